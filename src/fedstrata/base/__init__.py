"""The lowest layer of the package: records, settings and registries, randomness, errors, files and processes."""
