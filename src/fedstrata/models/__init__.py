"""Models as pure functions of their parameters, a small zoo of them, and BatchNorm over the federation."""
