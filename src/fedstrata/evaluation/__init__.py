"""How good a model is: metrics, what was held out to measure them on, and for whom it is how good."""
