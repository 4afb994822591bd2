"""Objectives, which clients minimise, with one small file for each objective."""
