"""How a client answers what it is asked."""
