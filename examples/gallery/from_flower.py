"""
From Flower
===========

This page shows the same experiment in Flower and in fedstrata. FedAvg trains on scikit-learn's digits, which are
divided among ten clients with label skew. In each round, half of the clients train for five epochs.

**In Flower**, you write the client's code, and pass a strategy to the server. The following code needs
``flwr[simulation]``, and is not run on this page:

.. code-block:: python

   from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
   from flwr.clientapp import ClientApp
   from flwr.serverapp import ServerApp
   from flwr.serverapp.strategy import FedAvg
   from flwr.simulation import run_simulation

   client_app, server_app = ClientApp(), ServerApp()

   @client_app.train()
   def train(message, context):
       x, y = my_samples(context.node_config["partition-id"])      # your own partition
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

**In fedstrata**, you describe local training, the partition and the evaluation with settings:
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
# :doc:`/help/migrating` lists fedstrata's names for other terms of Flower.
#
# You can also pass your own PyTorch module and your own arrays:

from sklearn.datasets import load_digits
from torch import nn

x, y = load_digits(return_X_y=True)
module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
mine = fs.run(spec, model=module, data=(x[:1400].astype("float32"), y[:1400], x[1400:].astype("float32"), y[1400:]))
print(mine)
print("trained parameters:", {name: tuple(w.shape) for name, w in mine.params.items()})

# %%
# :doc:`/results/speed` compares the speed of the frameworks. ``benchmarks/peers/flower_run.py`` runs the experiment in
# Flower.
