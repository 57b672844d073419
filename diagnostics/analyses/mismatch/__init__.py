"""Two runs of the same tokens: their rows matched, and what each layer's difference of O consists of."""
