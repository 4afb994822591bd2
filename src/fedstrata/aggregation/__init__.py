"""Aggregation of the clients' models on the server."""
