"""Local training: one loop, and the faster ways through it."""
