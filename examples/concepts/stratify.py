"""
Stratify: a schedule of labels
==============================

Most methods choose clients, and take the labels that come with them. Stratify chooses *labels*.

It shuffles a schedule in which every label stands about as often as every other. At each position trains a client
that holds the label of that position. So the model sees the labels in the order in which centralised training would
show them, wherever they lie.

Twelve clients, label skew by a Dirichlet draw with α = 0.1:
"""

import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs
from fedstrata.base import style

CLIENTS, SHOWN, CHUNK = 12, 60, 10
data = fs.Data("digits").load()
held = fs.Dirichlet(alpha=0.1, clients=CLIENTS).split(data, seed=3).counts(data.y_train.numpy(), 10)

# %%
# **The schedule.** Label *l* stands in it as often as there are samples of it, but no more often than the median label:
# a label that is everywhere does not crowd out the others.

generator = np.random.default_rng(0)
available = held.sum(axis=0)
times = np.minimum(available, int(np.median(available)))
labels = generator.permutation(np.repeat(np.arange(10), times))[:SHOWN]
print("the first labels of the schedule:", *labels[:20])

# %%
# **The walk.** In the single-sample mode the model travels. At each position the server looks for the client that can
# train the longest run of positions from there on, up to the end of the chunk. Fewer changes of the client are fewer
# messages.

owner = np.empty(SHOWN, dtype=int)
position = 0
while position < SHOWN:
    end = (position // CHUNK + 1) * CHUNK
    holds = held[:, labels[position:end]] > 0  # (clients, positions)
    runs = np.cumprod(holds, axis=1).sum(axis=1)  # the positions that each client can train before it lacks a label
    longest = runs.max()
    owner[position : position + longest] = generator.choice(np.flatnonzero(runs == longest))
    position += longest

figure, (top, axes) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=[1, 6], layout="constrained")
colours = [style.categories(10)[label].light for label in labels]
top.bar(np.arange(SHOWN), 1, width=1, color=colours, edgecolor="white")
for place, label in enumerate(labels):
    top.text(place, 1.3, str(label), ha="center", va="center", fontsize=8)
top.set(yticks=[], ylim=(0, 1.6), title="the schedule: which label trains next; each label has a colour")
axes.plot(np.arange(SHOWN), owner, color="0.75", lw=1, zorder=1)
axes.scatter(np.arange(SHOWN), owner, c=colours, s=42, zorder=2)
for place in range(0, SHOWN + 1, CHUNK):
    axes.axvline(place - 0.5, color="0.85", lw=0.8, zorder=0)
axes.set(xlabel="position in the schedule", ylabel="the client that trains it", yticks=range(CLIENTS))
figure.show()

# %%
# Lines between the positions cut the schedule into chunks, within which runs are looked for.

hops = int((np.diff(owner) != 0).sum())
print(f"{SHOWN} positions, {hops} times from one client to another")

# %%
# **In batches.** The batch mode takes a batch of positions at once. For each position a client that holds its label
# draws a sample, and computes its gradient. The sum is the gradient of a centralised batch. Many samples are computed at
# the same time, and each batch costs a round of messages.
#
# The server needs to know who holds which label. With masked labels it only learns who holds the same one:
# :doc:`/privacy/masked-labels`.
#
# **Use it**: ``fedstrata run spec.toml --set method=stratify``; the modes are ``batch``, ``single`` and ``hybrid``.
# To read the whole method in one file: :doc:`/gallery/from_scratch`.
