"""The two sides that ``text.py`` compares: FedAvg of examples/shakespeare with fedstrata, and with Flower.

Flower's actors import this module, so that they read the sequences once. Functions of the main program would be sent to
them again for each client, with all that they refer to.
"""

from __future__ import annotations

import functools
import json
import random
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from work import cpu_seconds

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "shakespeare"
SPEC = tomllib.loads((FOLDER / "shakespeare.toml").read_text(encoding="utf-8"))
TRAINING, TOKENS = SPEC["training"], SPEC["task"]["outputs"]


class Clock:
    """The time at the end of each round, and the work that was done until then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float, int, int]] = []

    def round_over(self, sequences: int, clients: int) -> None:
        """Record the end of a round, in which ``clients`` trained on so many sequences."""
        self.ends.append((time.perf_counter(), cpu_seconds(), sequences, clients))

    def report(self, model: torch.nn.Module) -> None:
        """Print the accuracy and loss of a model on all test tokens, and the speed, as JSON in one line."""
        timed, (begun, cpu, *_) = self.ends[1:-1], self.ends[0]
        sequences = sum(each[2] for each in timed)
        measured = {
            **test(model),
            "per_second": sequences / (timed[-1][0] - begun),
            "per_cpu_second": sequences / (timed[-1][1] - cpu),
            "sequences": sum(each[2] for each in self.ends),
            "clients": sum(each[3] for each in self.ends),
        }
        print(json.dumps(measured), flush=True)


@functools.cache
def arrays() -> dict[str, torch.Tensor]:
    """Return the sequences, and the client of each training sequence, read once per process."""
    with np.load(FOLDER / SPEC["data"]["name"]) as file:
        sequences = {name: torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")}
        return sequences | {"client": torch.from_numpy(np.unique(file["client_train"], return_inverse=True)[1])}


def net(seed: int) -> torch.nn.Module:
    """Build the model, with a seed's initial parameters, which are the same on both sides."""
    from lstm import LSTM

    torch.manual_seed(seed)
    return LSTM((arrays()["x_train"].shape[1],), TOKENS, hidden=SPEC["model"]["hidden"])


@torch.no_grad()
def test(model: torch.nn.Module) -> dict[str, float]:
    """Return the share of all test tokens that a model predicts, and its mean cross-entropy."""
    hits, loss, tokens = 0, 0.0, 0
    for x, y in zip(arrays()["x_test"].split(256), arrays()["y_test"].split(256), strict=True):
        logits = model(x)
        hits += int((logits.argmax(-1) == y).sum())  # no prediction equals the −100 of padding
        loss += float(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
        tokens += int((y != -100).sum())
    return {"accuracy": hits / tokens, "loss": loss / tokens}


def run_fedstrata(seed: int) -> None:
    """Do the work with fedstrata."""
    import fedstrata as fs

    clock, model = Clock(), net(seed)
    overrides = [f"seed={seed}", "training.workers=1", "evaluation.every=0"]
    (spec,) = fs.variants(SPEC, ["fedavg"], overrides).values()
    history = fs.run(
        spec,
        model=fs.Model(model),
        callbacks=[lambda record: clock.round_over(record["samples"], record["clients_trained"])],
    )
    model.load_state_dict(history.params)
    clock.report(model)


def run_flower(seed: int) -> None:
    """Do the work with Flower's simulation, with a single Ray actor."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    clock, client_app, server_app = Clock(), ClientApp(), ServerApp()
    clients = int(arrays()["client"].max()) + 1
    random.seed(seed)  # Flower draws clients from it

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        where = arrays()["client"] == number
        x, y = arrays()["x_train"][where], arrays()["y_train"][where]
        model = net(seed)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        torch.manual_seed(hash((seed, message.content["config"]["server-round"], number)))
        optimizer = torch.optim.SGD(model.parameters(), lr=TRAINING["lr"])
        for _ in range(TRAINING["local_epochs"]):
            for batch in torch.randperm(len(x)).split(TRAINING["batch_size"]):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]).flatten(0, 1), y[batch].flatten()).backward()
                optimizer.step()
        metrics = MetricRecord({"tokens": int((y != -100).sum()), "sequences": TRAINING["local_epochs"] * len(x)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Counted(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            result = super().aggregate_train(server_round, replies)
            clock.round_over(sum(int(reply.content["metrics"]["sequences"]) for reply in replies), len(replies))
            return result

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Counted(
            fraction_train=0.0001,  # the minimum below decides
            fraction_evaluate=0.0,
            min_train_nodes=TRAINING["clients_per_round"],
            min_available_nodes=clients,
            weighted_by_key="tokens",
        )
        model = net(seed)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=TRAINING["rounds"])
        model.load_state_dict(result.arrays.to_torch_state_dict())
        clock.report(model)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app, client_app, clients,
        backend_config={"client_resources": resources, "init_args": {"num_cpus": 1, "log_to_driver": False}},
    )  # fmt: skip


SIDES = {"fedstrata": run_fedstrata, "flower": run_flower}
