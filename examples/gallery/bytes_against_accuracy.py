"""
Accuracy against bytes sent
===========================

How does the accuracy of a method depend on the number of bytes that the clients send? A Dirichlet distribution with α =
0.01 divides MNIST among 100 clients, and all clients are online. The runs take hours, so this page plots stored
results: ``benchmarks/communication.py`` wrote the file ``benchmarks/results/communication.json``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedstrata.base import style
from fedstrata.reporting.axes import log_ticks

file = Path.cwd().resolve().parents[1] / "benchmarks/results/communication.json"
results = json.loads(file.read_text())
study = {}
for key, run in results.items():
    data, method, codec, seed = key.split(" | ")
    if data == "mnist" and seed == "0":
        megabytes = 1000 * np.array(run["up"])  # the file gives cumulative traffic in GB
        study[method, codec] = (megabytes, np.array(run["accuracy"], dtype=float))
print(len(study), "runs on MNIST with seed 0")

# %%
# **Pareto front.** The script prints the traffic and the accuracy at the end of each run. A run is on the Pareto front
# if every more accurate run sent more bytes.

ends = {key: (up[-1], 100 * accuracy[~np.isnan(accuracy)][-1]) for key, (up, accuracy) in study.items()}
front = []
for key, (cost, reached) in sorted(ends.items(), key=lambda item: item[1]):
    if not any(c <= cost and r > reached for c, r in ends.values()):
        front.append(key)
    mark = f"   ← {len(front)} on the front" if key in front else ""
    print(f"{cost:9,.0f} MB  {reached:5.2f} %  {', '.join(key)}{mark}")

# %%
# **Learning curves.** The figure shows the accuracy, averaged over five rounds, against the number of bytes that the
# clients have sent. The horizontal axis is logarithmic. Runs on the Pareto front are coloured and numbered.

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
# With PowerSGD, Stratify's clients send fewer bytes than FedAvg's clients without compression, and Stratify's accuracy
# does not fall. With compression, FedAvg's clients send even fewer bytes. This page counts only bytes to the server, and
# only seed 0: see :doc:`/results/compression` for both directions and several seeds. The page :doc:`/guides/compression`
# helps you to choose a codec.
