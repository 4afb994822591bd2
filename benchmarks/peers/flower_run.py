"""Do the work of ``work.py`` with Flower's simulation: FedAvg over Ray actors, each with one core and one thread."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import CORES, Clock, final_loss, loaded, net, parse


def main() -> None:
    _, setting = parse()
    clock = Clock(setting)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y, parts = loaded(setting)
        mine = parts[context.node_config["partition-id"]]
        inputs, labels = x[mine], y[mine]
        model = net(setting.model)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
        steps = seen = 0
        for _ in range(setting.epochs):
            for batch in torch.randperm(len(labels)).split(setting.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
                steps, seen = steps + 1, seen + len(batch)
        metrics = MetricRecord({"num-examples": len(labels), "steps": steps, "seen": seen})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Counted(FedAvg):
        def aggregate_train(self, server_round: int, replies):
            replies = list(replies)
            for reply in replies:
                if reply.has_content():
                    told = reply.content["metrics"]
                    clock.trained(int(told["steps"]), int(told["seen"]))
            found = super().aggregate_train(server_round, replies)
            clock.round_over()
            return found

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Counted(
            fraction_train=setting.invited / setting.clients,
            fraction_evaluate=0.0,
            min_train_nodes=setting.invited,
            min_available_nodes=setting.clients,
        )
        model = net(setting.model)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=clock.rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        clock.report(final_loss(model, setting))

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app, client_app, setting.clients,
        backend_config={"client_resources": resources, "init_args": {"num_cpus": CORES, "log_to_driver": False}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
