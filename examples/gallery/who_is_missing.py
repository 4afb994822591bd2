"""
Dropouts make the model forget classes
======================================

Each of twenty clients has images of two digits, and on average, four in five clients are absent from a round. In some
rounds, all clients that have images of a certain digit are absent. Which digits does the model then forget?
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import fedstrata as fs
from fedstrata.base import style
from fedstrata.reporting.axes import heat_map

METHODS = {"FedAvg": fs.FedAvg(), "balanced softmax": fs.BSMFedAvg(), "ReBaFL": fs.ReBaFL()}
spec = fs.Experiment(
    partition=fs.Classes(clients=20, per_client=2),
    availability=fs.Persistent(p=0.2, period=4),
    model={"name": "mlp", "hidden": [64]},
    training=fs.Training(rounds=32, clients_per_round=20, local_epochs=5, batch_size=10, lr=0.05),
    evaluation=fs.Evaluation(per_class=True),
)

# %%
# With ``Persistent``, the set of online clients changes only every four rounds, because real devices are often absent
# for several rounds. In each round, the same clients are absent for all methods.

found = {}
for name, method in METHODS.items():
    history = fs.run(spec.replace(method=method))
    found[name] = np.array([record["per_class"] for record in history])
    print(
        f"{name}: mean accuracy over the rounds {found[name].mean():.1%}, worst digit {found[name].min(axis=1).mean():.1%}"
    )

# %%
# Each row of a figure is a digit, and each column is a round. Dark colours mean a high recall, and light colours mean
# that the model has forgotten the digit. Hatching marks rounds in which all clients with the digit are absent.

prepared = fs.prepare(spec)
held = prepared.assignment.counts(prepared.data.y_train.numpy(), 10) > 0
availability = prepared.spec.availability
there = np.array([availability.online(np.arange(20), round, spec.seed) for round in range(1, 33)])
gone = ~(there.astype(int) @ held.astype(int) > 0)

figure, panels = plt.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")
for axes, (name, classes) in zip(panels, found.items(), strict=True):
    image = axes.imshow(
        100 * classes.T, aspect="auto", cmap=heat_map(), vmin=0, vmax=100, extent=(0.5, 32.5, 9.5, -0.5)
    )
    round_, digit = np.nonzero(gone)
    for x, y in zip(round_ + 0.5, digit - 0.5, strict=True):
        absent = axes.add_patch(
            Rectangle((x, y), 1, 1, fill=False, hatch="////", edgecolor=style.FATES["failed"].light, lw=0)
        )
    axes.set(title=name, ylabel="digit", yticks=range(10))
panels[-1].set_xlabel("round")
figure.legend([absent], ["all clients with the digit are absent"], loc="outside upper right", frameon=False)
figure.colorbar(image, ax=panels, label="recall, %", shrink=0.6)
figure.show()

# %%
# :doc:`/concepts/rebafl` explains the reason, with a figure for one digit.
