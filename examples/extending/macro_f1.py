"""A metric: the macro-averaged F1. In a spec: evaluation.metrics = ["accuracy", "macro_f1:macro_f1"]."""

from sklearn.metrics import f1_score


def macro_f1(labels, probabilities):
    """Return the mean F1 over the classes that have samples or were predicted.

    Args:
        labels: The true classes from 0 to C − 1, shape (N,).
        probabilities: The predicted probability of each class, shape (N, C).
    """
    return float(f1_score(labels, probabilities.argmax(axis=1), average="macro", zero_division=0))
