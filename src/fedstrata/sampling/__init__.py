"""Samplers, which choose the clients of a round and the fraction of its samples that each client uses."""
