"""
Stratify: a schedule of labels
==============================

Most methods choose clients, and the clients' samples then determine the labels in training. Stratify instead chooses
*labels*.

Stratify shuffles a *schedule*, which is a list of labels in which each label occurs about equally often. For each
position of the schedule, a client trains on one of its samples with the label at this position. The shares of the
labels in training are therefore the same as in centralised training, although each client has only a few labels.

The example has twelve clients with label skew (Dirichlet, α = 0.1):
"""

import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs
from fedstrata.base import style

CLIENTS, SHOWN, CHUNK = 12, 60, 10
data = fs.Data("digits").load()
held = fs.Dirichlet(alpha=0.1, clients=CLIENTS).split(data, seed=3).counts(data.y_train.numpy(), 10)

# %%
# **Schedule.** Each label occurs in the schedule as often as in the data, but at most as often as the median over all
# labels. Frequent labels therefore do not dominate.

generator = np.random.default_rng(0)
available = held.sum(axis=0)
times = np.minimum(available, int(np.median(available)))
labels = generator.permutation(np.repeat(np.arange(10), times))[:SHOWN]
print("the first labels of the schedule:", *labels[:20])

# %%
# **Mode single.** In this mode, clients train the model one after another. The schedule is divided into chunks. At each
# position, the server chooses the client that can train on the most successive positions of the chunk. This choice
# reduces the traffic, because clients pass the model on less often.

owner = np.empty(SHOWN, dtype=int)
position = 0
while position < SHOWN:
    end = (position // CHUNK + 1) * CHUNK
    holds = held[:, labels[position:end]] > 0  # the shape is (clients, positions)
    runs = np.cumprod(holds, axis=1).sum(axis=1)  # successive positions that each client can train
    longest = runs.max()
    owner[position : position + longest] = generator.choice(np.flatnonzero(runs == longest))
    position += longest

figure, (top, axes) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=[1, 6], layout="constrained")
colours = [style.categories(10)[label].light for label in labels]
top.bar(np.arange(SHOWN), 1, width=1, color=colours, edgecolor="white")
for place, label in enumerate(labels):
    top.text(place, 1.3, str(label), ha="center", va="center", fontsize=8)
top.set(yticks=[], ylim=(0, 1.6), title="the schedule of labels; each label has a colour")
axes.plot(np.arange(SHOWN), owner, color="0.75", lw=1, zorder=1)
axes.scatter(np.arange(SHOWN), owner, c=colours, s=42, zorder=2)
for place in range(0, SHOWN + 1, CHUNK):
    axes.axvline(place - 0.5, color="0.85", lw=0.8, zorder=0)
axes.set(xlabel="position in the schedule", ylabel="client that trains", yticks=range(CLIENTS))
figure.show()

# %%
# The vertical lines separate the chunks.

hops = int((np.diff(owner) != 0).sum())
print(f"{SHOWN} positions; the model is passed from one client to another {hops} times")

# %%
# **Mode batch.** In this mode, each training step uses several positions of the schedule, called a batch. For each
# position, a client draws a sample with this label, and computes its gradient. The sum of these gradients equals the
# gradient of a centralised batch. Clients compute at the same time, but each batch needs an exchange of messages.
#
# The server needs to know which labels each client has. With masked labels, the server learns only which clients have a
# label in common (:doc:`/privacy/masked-labels`).
#
# **Use Stratify**: ``fedstrata run spec.toml --set method=stratify``. The modes are ``batch``, ``single`` and
# ``hybrid``. :doc:`/gallery/from_scratch` shows the whole method in one file.
