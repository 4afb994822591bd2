"""Stratify: a stratified label schedule decides which label trains next, and only its holders are asked."""
