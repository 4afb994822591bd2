"""What a user calls: run, compare, sweep and search, with references to compare with."""
