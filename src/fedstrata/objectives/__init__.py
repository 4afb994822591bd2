"""Objectives, which are the losses that clients minimise. Most objectives have a Python module of their own."""
