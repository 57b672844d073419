"""One head against float64: opened (open), measured (measure, truth), its recipe (baseline), its dW_Q (projection)."""
