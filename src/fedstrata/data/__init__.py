"""Load data sets, prepare them, and divide them among clients."""
