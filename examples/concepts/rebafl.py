"""
ReBaFL: when a class is missing
===============================

If a client does not have samples of a class, local training reduces the logit of this class. If all clients with this
class drop out of a round, no update increases the logit again, and the averaged model forgets the class.

ReBaFL (relaxed balanced softmax and prototypes) changes the loss of the clients in two ways:

- **Relaxed balanced softmax** adds a term to the logit of each class: the logarithm of the class's share of the
  client's samples. The logit of a class without samples then falls only a little.
- **Prototypes** are the mean features of each class, which the server stores. From prototypes, clients compute features
  of classes without samples, and train the model's head on these features.

Each of twenty clients has images of two digits. In rounds 10 to 20, all clients that have images of nines are absent.
"""

import matplotlib.pyplot as plt
import numpy as np
from pydantic import PrivateAttr

import fedstrata as fs
from fedstrata.base import style

NINE, ROUNDS, GONE = 9, 30, range(10, 21)


class NoNines(fs.Availability):
    """All clients are online, except clients with nines in some rounds."""

    _holds: object = PrivateAttr(default=None)

    def check(self, population):
        """Store which clients have nines."""
        self._holds = population.labels[:, NINE] > 0

    def online(self, clients, round, seed):
        """Return whether each client is online."""
        return ~self._holds[clients] if round in GONE else np.ones(len(clients), dtype=bool)


def recalls(method):
    """Return the recall of nines, and the mean recall of the other digits, in each round."""
    spec = fs.Experiment(
        partition=fs.Classes(clients=20, per_client=2),
        availability=NoNines(),
        method=method,
        model={"name": "mlp", "hidden": [64]},
        training=fs.Training(rounds=ROUNDS, clients_per_round=20, local_epochs=5, batch_size=10, lr=0.05),
        evaluation=fs.Evaluation(per_class=True),
    )
    classes = np.array([record["per_class"] for record in fs.run(spec)])
    return classes[:, NINE], np.delete(classes, NINE, axis=1).mean(axis=1)


# %%
# Clients, dropouts and model are the same for both methods. Only the loss of the clients differs.

figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for axes, method in zip(panels, (fs.FedAvg(), fs.ReBaFL()), strict=True):
    nine, others = recalls(method)
    axes.axvspan(GONE[0] - 0.5, GONE[-1] + 0.5, color=style.GRID.light, label="clients with nines are absent")
    axes.plot(
        np.arange(1, ROUNDS + 1),
        100 * others,
        color=style.SERIES[1].colour.light,
        ls="--",
        label="the other digits, mean",
    )
    axes.plot(np.arange(1, ROUNDS + 1), 100 * nine, color=style.SERIES[4].colour.light, lw=2.2, label="the nine")
    axes.set(title=method.name, xlabel="round", ylim=(0, 102))
    missed = np.array(GONE) - 1
    print(f"{method.name}: recall of the nine while it is missing: {nine[missed].mean():.0%} on average")
panels[0].set_ylabel("recall, %")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
figure.show()

# %%
# FedAvg forgets nines within one or two rounds, and learns nines again when the clients return. :doc:`/results/rebafl`
# compares the methods under random dropouts.
#
# **Privacy**: each client sends the mean features and the number of samples of each of its classes.
# :doc:`/results/privacy-audits` shows what these values reveal, and ``fedstrata audit prototypes RUN`` measures what
# they reveal in your run.
#
# **Use ReBaFL**: ``fedstrata run spec.toml --set method=rebafl``.
