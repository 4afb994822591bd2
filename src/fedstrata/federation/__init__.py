"""The seam between a method and its clients."""
