"""How the server learns who shares a label without learning the labels."""
