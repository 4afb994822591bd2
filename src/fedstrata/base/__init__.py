"""The lowest layer of the package: records, settings, registries, random numbers, errors, files and processes."""
