"""Which clients take part, and which of their samples."""
