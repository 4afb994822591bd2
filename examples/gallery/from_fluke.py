"""
From fluke
==========

The same experiment in fluke and in fedstrata: SCAFFOLD on MNIST-like digits, Dirichlet label skew, half of the clients in
each round.

**In fluke** an experiment is two YAML files and a command. (Shown as text; it runs where ``fluke-fl`` is installed.)

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

**In fedstrata** it is one TOML file, and ``fedstrata run spec.toml``:
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import fedstrata as fs

SPEC = """
data = "digits"                 # or "mnist", where mnist.npz lies in ~/.cache/fedstrata
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
# Where is what?
#
# ============================================= ========================================================================
# fluke                                         fedstrata
# ============================================= ========================================================================
# ``Client.fit``                                ``[training]``, and an ``Objective`` where the loss is yours
# ``Server.get_eligible_clients``               ``ClientSampler.select``
# ``Server.aggregate``                          ``Aggregator.coefficients``; or a ``Method`` for a round of your own
# ``CentralizedFL`` subclass                    ``Recipe``: the choices in which it differs from FedAvg
# ``DataSplitter``, ``distribution``            ``[partition]``: iid, dirichlet, classes, shards, domain, power-law …
# several configurations                        ``fedstrata sweep``, a grid or a search
# ``logger: {name: WandBLog}``                  ``[tracking]``, or a callback: :doc:`/guides/tracking`
# ``fluke clients-only``, ``centralized``       ``fedstrata compare --references local,centralised``
# ============================================= ========================================================================
#
# How fast both are on the same work: :doc:`/results/speed`, whose runner for fluke is ``benchmarks/peers/fluke_run.py``.
