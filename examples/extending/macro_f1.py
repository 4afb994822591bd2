"""A metric: macro-averaged F1. evaluation.metrics = ["accuracy", "macro_f1:macro_f1"]."""

from sklearn.metrics import f1_score


def macro_f1(labels, probabilities):
    """The mean of F1 over the classes that are there or predicted.

    Args:
        labels: (N,), 0…C−1.
        probabilities: (N, C).
    """
    return float(f1_score(labels, probabilities.argmax(axis=1), average="macro", zero_division=0))
