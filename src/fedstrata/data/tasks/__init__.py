"""Learning tasks. A task defines the targets, the loss, and the results that an evaluation records."""
