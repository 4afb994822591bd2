"""What runs where the data are."""
