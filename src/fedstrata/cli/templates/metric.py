"""A metric: how good the model is. Try it:

fedstrata run --set 'evaluation.metrics=["accuracy", "{module}:worst_recall"]'
"""


def worst_recall(labels, probabilities):
    """The recall of the class that is recognised worst.

    Args:
        labels: The true classes, (N,), NumPy whole numbers.
        probabilities: Of each class, (N, C).
    """
    said = probabilities.argmax(axis=1)
    return float(min((said[labels == c] == c).mean() for c in set(labels.tolist())))
