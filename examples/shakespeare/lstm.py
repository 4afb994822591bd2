"""A model that predicts the next character at each position of a sequence."""

from torch import nn


class LSTM(nn.Module):
    """An LSTM layer over characters, which computes logits (B, T, classes) from character ids (B, T)."""

    def __init__(self, shape, classes, embedded=32, hidden=128):
        super().__init__()
        self.embedding = nn.Embedding(classes, embedded)
        self.memory = nn.LSTM(embedded, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        """Return logits for each position of the sequences ``x``."""
        return self.head(self.memory(self.embedding(x))[0])
