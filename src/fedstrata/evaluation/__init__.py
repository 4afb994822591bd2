"""The evaluation of models: metrics, the samples that are held out for them, and the results of each client."""
