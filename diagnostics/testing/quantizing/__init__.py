"""Below 16 bits: tensors in a quantiser's numbers, and what a fake quantiser does to a layer (``quant``)."""
