"""Models (pure functions of their parameters), the built-in models, and BatchNorm over several clients."""
