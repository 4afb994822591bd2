"""One run: its preparation, its loop over rounds, its folder and checkpoints, and inference with its final model."""
