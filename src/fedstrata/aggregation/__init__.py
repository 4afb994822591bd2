"""Aggregate the clients' models on the server."""
