"""Samplers, which choose the clients of a round and the fraction of samples that each client uses."""
