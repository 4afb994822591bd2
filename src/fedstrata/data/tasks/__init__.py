"""Learning tasks, which define the targets, the loss and the results that an evaluation records."""
