"""Secure sums: the server learns the sum of the sites' vectors, but not the vector of any site."""
