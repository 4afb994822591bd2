"""Looking at what a run does."""
