"""
ReBaFL: when a class is missing
===============================

A client that lacks a class learns that this class never comes: its gradients push the class's logit down. When those
who hold the class drop out of a round, nobody pushes it up again, and the averaged model forgets it.

ReBaFL (relaxed balanced softmax, and prototypes) changes what a client minimises:

- **Relaxed balanced softmax** adds the logarithm of each class's share at the client to its logits. A class that the
  client lacks is hardly pushed down.
- **Prototypes**: the server keeps the mean feature of each class, and clients train their head on features of classes
  that they lack.

Twenty clients hold two digits each. From round 10 to round 20 whoever holds a nine is absent, and nobody brings a nine.
"""

import matplotlib.pyplot as plt
import numpy as np
from pydantic import PrivateAttr

import fedstrata as fs
from fedstrata.base import style

NINE, ROUNDS, GONE = 9, 30, range(10, 21)


class NoNines(fs.Availability):
    """Everybody is there, but for those who hold a nine in some rounds."""

    _holds: object = PrivateAttr(default=None)

    def check(self, population):
        """Remembers who holds a nine."""
        self._holds = population.labels[:, NINE] > 0

    def online(self, clients, round, seed):
        """Whether each of the clients is there."""
        return ~self._holds[clients] if round in GONE else np.ones(len(clients), dtype=bool)


def recalls(method):
    """The recall of the nine, and the mean recall of the other digits, round by round."""
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
# The same clients, the same absences, the same model; what they minimise differs.

figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for axes, method in zip(panels, (fs.FedAvg(), fs.ReBaFL()), strict=True):
    nine, others = recalls(method)
    axes.axvspan(GONE[0] - 0.5, GONE[-1] + 0.5, color=style.GRID.light, label="nobody brings a nine")
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
# FedAvg forgets the nine within a round or two, and learns it anew when it comes back. What that costs over many kinds of
# absence is in :doc:`/results/index`.
#
# **What it costs**: clients send the mean features of their classes and how many samples each is the mean of. What that
# tells the server is in :doc:`/results/privacy-audits`; ``fedstrata audit prototypes`` attacks it.
#
# **Use it**: ``fedstrata run spec.toml --set method=rebafl``.
