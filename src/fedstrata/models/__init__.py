"""The interface of models (pure functions of their parameters), built-in models, and BatchNorm over several clients."""
