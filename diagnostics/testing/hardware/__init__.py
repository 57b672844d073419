"""What this machine's arithmetic does, measured: ``selftest``, the hardware's profile, and where it is kept."""
