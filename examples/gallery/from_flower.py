"""
From Flower
===========

The same experiment in Flower and in fedstrata: FedAvg on the digits, ten clients by label skew, half of them invited to a
round, five epochs each. If you know one, you can read the other.

**In Flower** you write what a client does and hand a strategy to a server. (Shown as text; it runs where ``flwr[simulation]``
is installed.)

.. code-block:: python

   from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
   from flwr.clientapp import ClientApp
   from flwr.serverapp import ServerApp
   from flwr.serverapp.strategy import FedAvg
   from flwr.simulation import run_simulation

   client_app, server_app = ClientApp(), ServerApp()

   @client_app.train()
   def train(message, context):
       x, y = my_samples(context.node_config["partition-id"])      # your partition
       model = net()
       model.load_state_dict(message.content["arrays"].to_torch_state_dict())
       optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
       for _ in range(5):
           for batch in torch.randperm(len(y)).split(32):
               optimizer.zero_grad()
               F.cross_entropy(model(x[batch]), y[batch]).backward()
               optimizer.step()
       metrics = MetricRecord({"num-examples": len(y)})
       return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

   @server_app.main()
   def serve(grid, context):
       strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=10)
       strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=20, evaluate_fn=my_evaluation)

   run_simulation(server_app, client_app, num_supernodes=10)

**In fedstrata** local training, the partition and the evaluation are named, and a line each:
"""

import fedstrata as fs

spec = fs.Experiment(
    data="digits",
    partition=fs.Dirichlet(alpha=0.5, clients=10),
    method=fs.FedAvg(),
    training=fs.Training(rounds=20, clients_per_round=5, local_epochs=5, batch_size=32, lr=0.1),
)
history = fs.run(spec)
print(history)

# %%
# Where is what?
#
# ============================================= ========================================================================
# Flower                                        fedstrata
# ============================================= ========================================================================
# ``ClientApp``, ``@app.train()``               ``[training]``, and an ``Objective`` where the loss is yours
# ``Strategy.configure_train``                  ``ClientSampler.select``
# ``Strategy.aggregate_train``                  ``Aggregator.coefficients``; or a ``Method`` for a round of your own
# ``flwr-datasets`` partitioners                ``[partition]``; ``hub:owner/name`` as ``data.name`` for the same data
# ``evaluate_fn``                               ``[evaluation]``, on the test set, by client, on held-out clients
# ``run_simulation``                            ``fs.run(spec)``; ``engine="ray"`` for Flower's own way
# SuperLink and SuperNodes                      ``fedstrata deploy``: :doc:`/deploy/index`
# clients that fail at random                   ``[availability]``: :doc:`/guides/dropouts`
# ============================================= ========================================================================
#
# Your own module and arrays go in as they are:

from sklearn.datasets import load_digits
from torch import nn

x, y = load_digits(return_X_y=True)
module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
mine = fs.run(spec, model=module, data=(x[:1400].astype("float32"), y[:1400], x[1400:].astype("float32"), y[1400:]))
print(mine)
print("trained parameters:", {name: tuple(w.shape) for name, w in mine.params.items()})

# %%
# How fast both are on the same work: :doc:`/results/speed`, whose runner for Flower is ``benchmarks/peers/flower_run.py``.
