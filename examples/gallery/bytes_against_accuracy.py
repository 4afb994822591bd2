"""
Bytes against accuracy
======================

How many bytes buy how much accuracy? MNIST, 100 clients, Dirichlet(0.01), everybody there. The runs take hours, so that this
page draws the committed results: ``benchmarks/results/communication.json``, made by ``benchmarks/communication.py``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedstrata.base import style
from fedstrata.reporting.draw import log_ticks

file = Path.cwd().resolve().parents[1] / "benchmarks/results/communication.json"
results = json.loads(file.read_text())
study = {}
for key, run in results.items():
    data, method, codec, seed = key.split(" | ")
    if data == "mnist" and seed == "0":
        megabytes = 1000 * np.array(run["up"])  # the file has GB, from the first round to this one
        study[method, codec] = (megabytes, np.array(run["accuracy"], dtype=float))
print(len(study), "runs on MNIST with seed 0")

# %%
# **The front.** What does each run reach at its end, and what has it cost? A run is on the front if no other run is both
# cheaper and better.

ends = {key: (up[-1], 100 * accuracy[~np.isnan(accuracy)][-1]) for key, (up, accuracy) in study.items()}
front = []
for key, (cost, reached) in sorted(ends.items(), key=lambda item: item[1]):
    if not any(c <= cost and r > reached for c, r in ends.values()):
        front.append(key)
    mark = f"   ← {len(front)} on the front" if key in front else ""
    print(f"{cost:9,.0f} MB  {reached:5.2f} %  {', '.join(key)}{mark}")

# %%
# **The curves.** Accuracy against the bytes that clients have sent, on a logarithmic axis, as the mean of five rounds.
# The runs on the front have colours and numbers.

LINES = style.lines(["fedavg", "stratify", "scaffold", "fedstas", "rebafl"])
figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
for key, (up, accuracy) in study.items():
    smooth = np.convolve(100 * accuracy, np.ones(5) / 5, mode="valid")
    if key in front:
        number, family = front.index(key) + 1, key[0].split(",")[0]
        colour = LINES[family].colour.light
        axes.plot(up[4:], smooth, color=colour, lw=1.8, zorder=3, label=f"{number}  {', '.join(key)}")
        axes.annotate(str(number), (up[-1], smooth[-1]), (4, 4), textcoords="offset points", weight="bold")
    else:
        axes.plot(up[4:], smooth, color=style.OTHER.colour.light, lw=1)
axes.set(xscale="log", xlabel="MB sent by clients", ylabel="test accuracy, %", ylim=(20, 100))
log_ticks(axes.xaxis)
handles, labels = axes.get_legend_handles_labels()
order = np.argsort(labels)
axes.legend([handles[i] for i in order], [labels[i] for i in order], frameon=False, title="on the front", fontsize=9)
figure.show()

# %%
# Encoded both ways, Stratify sends less than FedAvg does and stays as good as it is. :doc:`/guides/compression` says which codec
# fits when, and what each one loses.
