"""Planted attention kernels for the study of verdicts: an independent attention, its defects, inputs and effects."""
