"""
Compose your own
================

A method is four choices. Take FedAvg, and replace one at a time: a client sampler and an objective of your own, a dropout
model of your own, and a server optimiser that is there already.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch.nn.functional as F

import fedstrata as fs
from fedstrata.base import style

# %%
# **Who takes part**: those who have not been invited for the longest time.


class LongestAway(fs.ClientSampler):
    """The state is the round of each client's last invitation."""

    def init(self, federation):
        """Nobody has been invited."""
        return np.zeros(federation.config.clients, dtype=np.int64)

    def select(self, federation, state, weights):
        """The clients of this round, and the new state."""
        there = federation.candidates()
        m = federation.config.training.invited(federation.config.clients)
        away = federation.round - state[there] + federation.rng("ties").random(len(there))
        chosen = there[np.argsort(-away)][:m]
        state = state.copy()
        state[chosen] = federation.round
        return fs.Selection.plain(chosen, len(there)), state


# %%
# **What they minimise**: cross-entropy with smoothed labels.


class Smoothed(fs.Objective):
    """Its fields are its settings."""

    smoothing: float = 0.1

    def loss(self, model, params, batch, context):
        """The mean over a batch."""
        return F.cross_entropy(model(params, batch.x), batch.y, label_smoothing=self.smoothing)


# %%
# **Who is there**: clients in time zones, of whom those who are awake mostly decline.


class Nights(fs.Availability):
    """There at night; by day with probability 0.1."""

    def online(self, clients, round, seed):
        """Whether each of the clients is there."""
        zone = fs.uniforms(seed, "zone", 0, clients)
        by_day = fs.uniforms(seed, "luck", round, clients) < 0.1
        return ((round / 12 + zone) % 1 < 0.5) | by_day


# %%
# **Each of them, and all together.** Everything else stays the same, and so do the random numbers of everything else.

spec = fs.Experiment(
    partition=fs.Dirichlet(alpha=0.1, clients=40),
    availability=Nights(),
    training=fs.Training(rounds=40, clients_per_round=10, local_epochs=2, batch_size=16, lr=0.1),
)
adam = {"name": "size", "server": {"optimizer": "adam", "lr": 0.02}}
methods = {
    "FedAvg": fs.FedAvg(),
    "+ sampler": fs.FedAvg(client_sampler=LongestAway()),
    "+ objective": fs.FedAvg(objective=Smoothed(smoothing=0.05)),
    "+ server Adam": fs.FedAvg(aggregator=adam),
    "all three": fs.FedAvg(client_sampler=LongestAway(), objective=Smoothed(smoothing=0.05), aggregator=adam),
}
lines = dict(zip(methods, style.SERIES, strict=False))  # grey is FedAvg in all pictures
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, method in methods.items():
    history = fs.run(spec.replace(method=method))
    rounds, accuracy = history.column("accuracy")
    smooth = np.convolve(100 * accuracy, np.ones(5) / 5, mode="valid")
    axes.plot(rounds[4:], smooth, lines[name].dash, color=lines[name].colour.light, label=name, lw=2)
    print(f"{name}: {accuracy[-10:].mean():.1%} over the last ten rounds")
axes.set(xlabel="round", ylabel="test accuracy, %, mean of five rounds", ylim=(0, 100))
axes.legend(frameon=False)
figure.show()

# %%
# One seed shows that the parts fit together, not which is better: ``fedstrata compare … --seeds 0,1,2,3,4`` does.
#
# On the command line each part is a file: ``fedstrata new sampler`` writes one that runs. :doc:`/guides/extend` has all kinds of
# parts.
