"""Mask labels: the server learns which clients have labels in common, but not what the labels are."""
