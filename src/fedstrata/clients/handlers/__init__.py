"""The functions (*handlers*) with which clients answer requests."""
