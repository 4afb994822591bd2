"""Local training: one loop, and faster steps for some models."""
