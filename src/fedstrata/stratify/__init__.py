"""Stratify: a schedule gives the next label to train, and the server asks only clients with samples of this label."""
