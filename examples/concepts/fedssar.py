"""
FedSSAR: clusters of models
===========================

In the first round of FedSSAR, all clients train once, and the server clusters the clients' models. The clustering
algorithm OPTICS finds groups of similar models, and also determines the number of groups.

In each round, the server draws clients from every cluster in proportion to the number of clients in the cluster. All
clusters are therefore represented in each round. Clients minimise their loss plus a proximal term, which keeps the
clients' models close to the global model.

This example has forty clients with one label each:
"""

import matplotlib.pyplot as plt
from sklearn.decomposition import PCA

import fedstrata as fs
from fedstrata.base import style
from fedstrata.reporting.strata import outline_strata

spec = fs.Experiment(
    partition=fs.Classes(clients=40, per_client=1),
    method=fs.FedSSAR(),
    training=fs.Training(rounds=1, clients_per_round=10, local_epochs=2),
)
view = fs.strata_after(fs.prepare(spec))
print(len(view.sizes()), "clusters of", view.sizes(), "clients")
print(f"{view.purity():.0%} of the samples have the most frequent label of their cluster")

# %%
# Both plots show the first two principal components of the clients' models. The server knows only the data of the left
# plot.

components = PCA(2)
where = components.fit_transform(view.points)
share = components.explained_variance_ratio_.sum()
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), sharex=True, sharey=True, layout="constrained")
left.scatter(*where.T, color=style.SOFT.light, s=30)
outline_strata(left, where, view.strata)
left.set_title(f"the {len(view.sizes())} clusters of OPTICS, with numbers of clients", fontsize=10)
left.margins(0.08)
for label, colour in enumerate(style.categories(10)):
    right.scatter(*where[view.labels.argmax(axis=1) == label].T, color=colour.light, s=50, label=label)
right.set_title("the label of each client", fontsize=10)
figure.legend(loc="outside right center", frameon=False, title="label")
for axes in (left, right):
    axes.set_xlabel(f"first of two principal components ({share:.0%} of the variance)")
figure.show()

# %%
# **Limits.** Only participants send a new model. In later rounds, the stored models of all other clients are outdated,
# and outdated models are similar to each other. With ``features = "updates"``, the server clusters clients by their
# updates instead.

for features in ("parameters", "updates"):
    later = spec.model_copy(
        update={
            "method": fs.FedSSAR(client_sampler={"name": "fedssar", "features": features}),
            "training": fs.Training(rounds=8, clients_per_round=10, local_epochs=2),
        }
    )
    found = fs.strata_after(fs.prepare(later), rounds=8)
    print(f"after 8 rounds, by {features}: {len(found.sizes())} clusters, purity {found.purity():.0%}")

# %%
# **Use FedSSAR**: ``fedstrata run spec.toml --set method=fedssar``. ``fedstrata strata RUN`` plots the clusters of a
# run.
