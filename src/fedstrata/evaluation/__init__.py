"""The evaluation of models: metrics, held-out samples, and the results of each client."""
