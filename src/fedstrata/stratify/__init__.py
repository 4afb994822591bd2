"""Stratify: a schedule determines the next label to train, and only clients with samples of this label are asked."""
