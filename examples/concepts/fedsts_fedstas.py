"""
FedSTS and FedSTaS: strata of clients
=====================================

Clients whose gradients look alike teach the model alike. FedSTS puts them into a **stratum** and asks a few of each.

A round goes like this:

1. Each client compresses its gradient to a few levels, and sends that.
2. The server clusters the compressed gradients with k-means: the strata.
3. **Neyman's allocation** says how many clients each stratum gives: m\\ :sub:`h` ∝ N\\ :sub:`h` S\\ :sub:`h`, its
   number of clients times how different they are. A stratum of clients that are all alike needs few.
4. Within a stratum, clients with longer gradients are drawn more often.

FedSTaS also samples the data: it asks for a number of samples instead of a number of clients.

Sixty clients, after three rounds:
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
# Each dot is a client, placed by the first two principal components of its compressed gradient. The server sees the
# left picture. The right one, the label that each client holds most of, it never sees. The strata found it from the
# gradients alone. Rings: whom the last round drew.

components = PCA(2)
where = components.fit_transform(view.points)
share = components.explained_variance_ratio_.sum()
drawn = np.isin(view.clients, invited[-1])
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), sharex=True, sharey=True, layout="constrained")
left.scatter(*where.T, color=style.SOFT.light, s=30)
outline_strata(left, where, view.strata)
left.scatter(*where[drawn].T, s=130, facecolors="none", edgecolors=style.ACCENT.light, lw=1.2)
left.set_title("strata, with numbers of clients; rings: drawn last", fontsize=10)
left.margins(0.08)
for label, colour in enumerate(style.categories(10)):
    right.scatter(*where[view.labels.argmax(axis=1) == label].T, color=colour.light, s=45, label=label)
figure.legend(loc="outside right center", frameon=False, title="label")
right.set_title("by the label that each client holds most of", fontsize=10)
for axes in (left, right):
    axes.set_xlabel(f"first of two principal components ({share:.0%} of the variance)")
figure.show()

# %%
# **Whom Neyman picks.** The same fifteen draws in proportion to the strata's sizes, and by Neyman: in proportion to size
# times the spread S of the compressed gradients within the stratum.

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
# A share is rounded to whole draws, and some strata may get no draw at all. That is how it was published; ``allocation`` has other rules. What is unbiased and
# what is not is in :doc:`/methods/samplers`.
#
# **Use it**: ``fedstrata run spec.toml --set method=fedsts``; ``fedstrata strata spec.toml --set method=fedsts`` draws
# this picture of your own clients.
