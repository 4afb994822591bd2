"""Local training: one loop for all objectives, and faster gradient steps for some models."""
