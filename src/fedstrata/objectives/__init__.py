"""Objectives, which are the losses that clients minimise. Most objectives have a module of their own."""
