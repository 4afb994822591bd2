"""
FedSTS and FedSTaS: strata of clients
=====================================

Clients with similar gradients change the model in similar ways. FedSTS groups such clients into a **stratum**, and only
a few clients of each stratum train.

A round has four steps:

1. Each client compresses its gradient to a short vector with a few distinct values, and sends this vector.
2. The server clusters the vectors with k-means. The clusters are the strata.
3. **Neyman's allocation** decides the number of clients m\\ :sub:`h` that are drawn from stratum h:
   m\\ :sub:`h` ∝ N\\ :sub:`h` S\\ :sub:`h`. N\\ :sub:`h` is the number of clients in the stratum, and S\\ :sub:`h` is
   the spread of their gradients. If the clients in a stratum are similar, a few draws are enough.
4. Within a stratum, clients with larger gradients are drawn more often.

FedSTaS also draws samples: each participant trains on only a random part of its samples.

The example shows sixty clients after three rounds:
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.decomposition import PCA

import fedstrata as fs
from fedstrata.base import style
from fedstrata.reporting.strata import outline_strata

spec = fs.Experiment(
    partition=fs.Dirichlet(alpha=0.05, clients=60, balance="client"),
    method=fs.FedSTS(strata=6),
    training=fs.Training(rounds=3, clients_per_round=15, local_epochs=2),
)
prepared = fs.prepare(spec)
invited = []
with fs.Simulation(prepared, listener=lambda _, replies: invited.append(sorted(replies))) as simulation:
    for record in simulation:
        print(f"round {record['round']}: draws by stratum {record['strata_allocation']}")
    view = fs.strata_of(prepared, simulation.state, 3)

# %%
# Each dot is a client. The first two principal components of the client's compressed gradient give the position of the
# dot. In the left plot, rings mark the clients that were drawn in the last round. The right plot shows the most
# frequent label of each client, which the server does not know. Clients with the same label are mostly in the same
# stratum, although the strata were computed only from gradients.

components = PCA(2)
where = components.fit_transform(view.points)
share = components.explained_variance_ratio_.sum()
drawn = np.isin(view.clients, invited[-1])
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), sharex=True, sharey=True, layout="constrained")
left.scatter(*where.T, color=style.SOFT.light, s=30)
outline_strata(left, where, view.strata)
left.scatter(*where[drawn].T, s=130, facecolors="none", edgecolors=style.ACCENT.light, lw=1.2)
left.set_title("strata, with numbers of clients; rings: drawn in round 3", fontsize=10)
left.margins(0.08)
for label, colour in enumerate(style.categories(10)):
    right.scatter(*where[view.labels.argmax(axis=1) == label].T, color=colour.light, s=45, label=label)
figure.legend(loc="outside right center", frameon=False, title="label")
right.set_title("the most frequent label of each client", fontsize=10)
for axes in (left, right):
    axes.set_xlabel(f"first of two principal components ({share:.0%} of the variance)")
figure.show()

# %%
# **Neyman's allocation.** The bars compare two ways to divide fifteen draws among the strata: in proportion to the
# strata's numbers of clients, and by Neyman's allocation. Neyman's allocation multiplies the number of clients by the
# spread S of the compressed gradients in the stratum.

sizes = np.bincount(view.strata)
deviations = [np.sqrt(view.points[view.strata == h].var(axis=0).mean()) for h in range(len(sizes))]
by_size, by_neyman = 15 * sizes / sizes.sum(), 15 * sizes * deviations / (sizes @ deviations)
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
place = np.arange(len(sizes))
axes.bar(place - 0.2, by_size, 0.4, label="in proportion to size", color=style.SERIES[0].colour.light)
axes.bar(place + 0.2, by_neyman, 0.4, label="Neyman", color=style.SERIES[2].colour.light)
axes.set_xticks(place, [f"{n} clients\nS = {s:.2g}" for n, s in zip(sizes, deviations, strict=True)], fontsize=8)
axes.set_ylabel("draws")
axes.legend(frameon=False)
figure.show()

# %%
# The published method rounds the numbers of draws to integers. Some strata may therefore get zero draws. Other values
# of the setting ``allocation`` select other rules. :doc:`/methods/samplers` says which rules are unbiased.
#
# **Use FedSTS**: ``fedstrata run spec.toml --set method=fedsts``. ``fedstrata strata spec.toml --set method=fedsts``
# makes the first figure for your own clients.
