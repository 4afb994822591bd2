"""The lowest layer: records, settings and registries, randomness, errors, files and processes."""
