"""
Compose your own method
=======================

Most methods consist of a client sampler, a data sampler, an objective and an aggregator. This script starts with
FedAvg, and replaces one part at a time: the client sampler, the objective and the server optimiser. The script also
defines its own availability model, which simulates dropouts.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch.nn.functional as F

import fedstrata as fs
from fedstrata.base import style

# %%
# **Client sampler**: this sampler invites the clients that have not been invited for the longest time.


class LongestAway(fs.ClientSampler):
    """Invites the clients that waited longest. The state is the round of each client's last invitation."""

    def init(self, federation):
        """Return the first state: zero for clients that have not been invited yet."""
        return np.zeros(federation.config.clients, dtype=np.int64)

    def select(self, federation, state, weights):
        """Return the clients of this round, and the new state."""
        there = federation.candidates()
        m = federation.config.training.invited(federation.config.clients)
        away = federation.round - state[there] + federation.rng("ties").random(len(there))
        chosen = there[np.argsort(-away)][:m]
        state = state.copy()
        state[chosen] = federation.round
        return fs.Selection.plain(chosen, len(there)), state


# %%
# **Objective**: clients minimise the cross-entropy with smoothed labels.


class Smoothed(fs.Objective):
    """Cross-entropy with smoothed labels. The fields of the class are its settings."""

    smoothing: float = 0.1

    def loss(self, model, params, batch, context):
        """Return the mean loss over a batch."""
        return F.cross_entropy(model(params, batch.x), batch.y, label_smoothing=self.smoothing)


# %%
# **Availability**: clients are devices in different time zones, which are online at night and mostly offline by day.


class Nights(fs.Availability):
    """Clients are online at night, and by day with probability 0.1."""

    def online(self, clients, round, seed):
        """Return whether each client is online."""
        zone = fs.uniforms(seed, "zone", 0, clients)
        by_day = fs.uniforms(seed, "luck", round, clients) < 0.1
        return ((round / 12 + zone) % 1 < 0.5) | by_day


# %%
# **Compare.** The script runs FedAvg with each new part, and with all three new parts together. All other settings and
# random numbers stay the same.

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
lines = dict(zip(methods, style.SERIES, strict=False))  # FedAvg is grey in all figures
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
# One seed does not show which part is better. To compare the parts, use ``fedstrata compare … --seeds 0,1,2,3,4``.
#
# To use a part on the command line, save its class in a file. ``fedstrata new sampler`` writes such a file.
# :doc:`/guides/extend` describes all parts that you can replace.
