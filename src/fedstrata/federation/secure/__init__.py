"""Secure sums: the server learns the sum of the sites' vectors, and no single vector."""
