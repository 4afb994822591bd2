"""Stratify: a schedule decides on which label to train next, and the server asks only clients that hold this label."""
