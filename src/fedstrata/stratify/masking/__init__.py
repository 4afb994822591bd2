"""Masking: the server learns which clients have labels in common, but not the labels."""
