"""
Four hospitals
==============

Four hospitals with 920 patients train a shared model that predicts coronary heart disease (a narrowed vessel). The data
of each patient stay at the hospital. Is the shared model better than a model that each hospital trains alone?

The folder ``examples/hospitals`` contains the data set *Heart Disease* (UCI Machine Learning Repository, 1988).
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs
from fedstrata.base import style

ROOT = Path.cwd().resolve().parents[1]

# %%
# **Spec.** The spec describes each column, says how missing values are replaced, and makes each hospital a client. The
# paths in the spec are relative to the root of the repository.

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
# The share of patients with the disease differs between the hospitals, so the data have natural label skew.
#
# **Run.** A run of thirty rounds takes one or two seconds.

history = fs.run(spec)
print(f"AUROC of the shared model on all hospitals' test patients: {history[-1]['test']['auroc']:.3f}")

# %%
# **Study.** With so few patients, a single split into training and test patients is not reliable. The script
# ``examples/hospitals/study.py`` therefore uses cross-validation with five folds and ten seeds. Each patient is
# predicted by models that were not trained on this patient. The 95 % intervals are bootstrap intervals over the
# patients.

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
# With ``local``, each hospital trains alone. For Long Beach, every method is better than ``local``. For Cleveland and
# Hungary, the methods are not better than ``local`` after ten rounds. For Switzerland, the study does not show which
# method is better, because only eight patients do not have the disease. :doc:`/results/hospitals` has the tables.
