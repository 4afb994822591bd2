"""Stratify: a schedule says which label to train next, and the server asks only clients with samples of this label."""
