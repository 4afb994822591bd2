"""
From fluke
==========

This page shows the same experiment in fluke and in fedstrata. SCAFFOLD trains on images of digits, which a Dirichlet
distribution divides among ten clients with label skew. Half of the clients take part in each round.

**In fluke**, an experiment consists of two YAML files and a command. The following command needs ``fluke-fl``, and is
not run on this page:

.. code-block:: yaml

   # exp.yaml
   data:
     dataset: {name: mnist}
     distribution: {name: dir, beta: 0.5}
     sampling_perc: 1.0
   protocol: {n_clients: 10, n_rounds: 20, eligible_perc: 0.5}

   # scaffold.yaml
   name: fluke.algorithms.scaffold.SCAFFOLD
   hyperparameters:
     model: MNIST_2NN
     client: {batch_size: 32, local_epochs: 5, optimizer: {lr: 0.1}}
     server: {weighted: false}

.. code-block:: text

   fluke --config=exp.yaml federation scaffold.yaml

**In fedstrata**, the experiment is one TOML file, which you run with ``fedstrata run spec.toml`` or in Python:
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import fedstrata as fs

SPEC = """
data = "digits"                 # or "mnist", with the file mnist.npz in ~/.cache/fedstrata
method = "scaffold"

[partition]
name = "dirichlet"              # fluke's "dir"
clients = 10                    # n_clients
alpha = 0.5                     # beta

[model]
name = "mlp"
hidden = [200, 200]             # MNIST_2NN

[training]
rounds = 20                     # n_rounds
clients_per_round = 5           # eligible_perc = 0.5
local_epochs = 5
batch_size = 32
lr = 0.1
"""
with TemporaryDirectory() as folder:
    path = Path(folder) / "spec.toml"
    path.write_text(SPEC)
    history = fs.run(fs.Experiment.from_toml(path))
print(history)

# %%
# :doc:`/help/migrating` lists fedstrata's names for other terms of fluke. :doc:`/results/speed` compares the speed of
# the frameworks. ``benchmarks/peers/fluke_run.py`` runs the experiment in fluke.
