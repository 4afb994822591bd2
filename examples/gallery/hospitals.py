"""
Four hospitals
==============

920 patients of four hospitals: does a vessel of the heart have a narrowing? No patient leaves the hospital. What does
each hospital gain from a model that all of them train?

The data are UCI's *Heart Disease* of 1988 and lie in the repository.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs
from fedstrata.base import style

ROOT = Path.cwd().resolve().parents[1]

# %%
# **The spec** says what each column is, what stands in for missing values, and that each hospital is a client. Paths in it
# are those from the repository's root.

spec = fs.Experiment.from_toml(
    ROOT / "examples/hospitals/hospitals.toml",
    [f'data.name="{ROOT}/examples/hospitals/heart.csv"', 'evaluation.metrics=["accuracy", "auroc"]'],
)
data = spec.data.load(spec.seed)
hospitals = spec.partition.split(data, spec.seed)
sick = hospitals.counts(data.y_train.numpy(), 2)
for name, (no, yes) in zip(data.client_names or range(4), sick, strict=True):
    print(f"{name}: {no + yes} patients to train on, {yes / (no + yes):.0%} with the disease")

# %%
# How common the disease is differs from hospital to hospital: that is label skew as it happens.
#
# **A run** of thirty rounds takes a second or two.

history = fs.run(spec)
print(f"AUROC of the shared model on all hospitals' test patients: {history[-1]['test']['auroc']:.3f}")

# %%
# **The study.** One split of so few patients says little. The committed study predicts every patient by models that have
# not seen them: five folds, ten seeds, 95 % intervals over patients. Its program is ``examples/hospitals/study.py``.

study = json.loads((ROOT / "benchmarks/results/hospitals.json").read_text())["hospitals"]
methods = ["local", "fedavg", "scaffold", "fedstas", "rebafl", "stratify", "centralised"]
lines = style.lines(methods)
figure, panels = plt.subplots(1, 4, figsize=(11, 3.6), sharey=True, layout="constrained")
for axes, (name, found) in zip(panels, study.items(), strict=True):
    for place, method in enumerate(reversed(methods)):
        cell = found["after rounds"]["10"][method]
        low, high = cell["interval"]
        colour = lines[method].colour.light
        axes.plot([low, high], [place, place], color=colour, lw=2)
        axes.plot(cell["auroc"], place, "o", color=colour)
    axes.axvline(found["after rounds"]["10"]["local"]["auroc"], color=lines["local"].colour.light, lw=0.8, ls=":")
    axes.set(title=f"{name}\n{found['patients']} patients, {found['well']} well", xlabel="AUROC", xlim=(0.4, 1))
panels[0].set_yticks(np.arange(len(methods)), list(reversed(methods)))
figure.show()

# %%
# ``local`` is each hospital alone. Long Beach gains from every method. Cleveland and Hungary gain nothing after ten rounds.
# Switzerland has eight patients without the disease: of that hospital nothing can be said. The tables are in
# :doc:`/results/hospitals`.
