"""Calibration of the bias tests: what they do where there is no bias, and where one was planted."""
