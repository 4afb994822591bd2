"""A metric, which measures how good the model is. Try it:

fedstrata run --set 'evaluation.metrics=["accuracy", "{module}:worst_recall"]'
"""


def worst_recall(labels, probabilities):
    """Return the lowest recall among the classes.

    Args:
        labels: The true class of each sample, a NumPy array of integers, shape (N,).
        probabilities: The predicted probability of each class for each sample, shape (N, C).
    """
    predicted = probabilities.argmax(axis=1)
    return float(min((predicted[labels == c] == c).mean() for c in set(labels.tolist())))
