"""Stop a running program where its attention goes wrong, and say in words what was found."""
