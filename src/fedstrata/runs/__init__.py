"""One run: its preparation, its loop, its folder and checkpoints, and the model that it leaves."""
