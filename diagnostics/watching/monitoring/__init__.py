"""Watching a training run: per-head metrics of attention's rounding error on the device, and an alarm on them."""
