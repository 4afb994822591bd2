"""Stratify: a schedule decides which label trains next, and the server asks only clients that hold this label."""
