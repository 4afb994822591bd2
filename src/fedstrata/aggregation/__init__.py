"""Aggregation of the clients' models at the server."""
