"""Models as pure functions of their parameters, the models that a spec can name, and BatchNorm over several clients."""
