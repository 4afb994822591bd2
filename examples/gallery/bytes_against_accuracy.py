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
# **The curves.** Bytes that clients have sent, on a logarithmic axis; each line is one method with one codec, as
# the mean of five rounds.

LINES = style.lines(["fedavg", "stratify", "scaffold", "fedstas", "rebafl"])
STYLES = {"none": "-", "bf16": (0, (1, 1)), "qsgd": "--", "top-k": ":", "powersgd, rank 2": (0, (5, 1))}
figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
for (method, codec), (up, accuracy) in study.items():
    family = method.split(",")[0]
    style = STYLES.get(codec, "-.")
    smooth = np.convolve(100 * accuracy, np.ones(5) / 5, mode="valid")
    axes.plot(up[4:], smooth, ls=style, color=LINES[family].colour.light, lw=1.8, label=f"{method}: {codec}")
axes.set(xscale="log", xlabel="MB sent by clients", ylabel="test accuracy, %", ylim=(20, 100))
axes.xaxis.set_major_formatter("{x:g}")
axes.legend(fontsize=8, frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
figure.show()

# %%
# **The front.** What does each run reach at its end, and what has it cost? A run is worth its bytes when no other is both
# cheaper and better.

ends = {key: (up[-1], 100 * accuracy[~np.isnan(accuracy)][-1]) for key, (up, accuracy) in study.items()}
for (method, codec), (cost, reached) in sorted(ends.items(), key=lambda item: item[1]):
    beaten = any(c <= cost and r > reached for c, r in ends.values())
    print(f"{cost:9,.0f} MB  {reached:5.2f} %  {method}, {codec}{'' if beaten else '   ← on the front'}")

# %%
# Encoded both ways, Stratify sends less than FedAvg does and stays as good as it is. :doc:`/guides/compression` says which codec
# fits when, and what each one loses.
