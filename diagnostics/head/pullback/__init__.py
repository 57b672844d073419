"""What lies between the projection and the attention, and how errors of dQ are pulled back through it."""
