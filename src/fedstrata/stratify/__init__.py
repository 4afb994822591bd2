"""Stratify: a schedule determines the next label to train on, and only clients with samples of this label are asked."""
