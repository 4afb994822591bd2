"""Learning tasks: what a target is, which loss is minimised, and what an evaluation keeps."""
