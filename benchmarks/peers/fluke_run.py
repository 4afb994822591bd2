"""Do the work of ``work.py`` with fluke: its FedAVG, its clients and its FastDataLoader (tensors in memory)."""

from __future__ import annotations

from torch import library

# fluke imports torchvision, whose wheel on PyPI does not fit the CPU build of PyTorch and needs these two operators.
_OPS = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from work import Clock, final_loss, net, owners, parse, tensors  # noqa: E402


def main() -> None:
    _, setting = parse()
    clock = Clock(setting)
    x, y = tensors(setting)

    class Counted(Client):
        def fit(self, override_local_epochs: int = 0) -> float:
            loss = super().fit(override_local_epochs)
            clock.trained(setting.epochs * len(self.train_set), setting.epochs * self.n_examples)
            return loss

    class Counting(FedAVG):
        def get_client_class(self) -> type[Client]:
            return Counted

        def notify(self, event: str, **kwargs: object) -> None:
            if event == "end_round":
                clock.round_over()
            super().notify(event, **kwargs)

    loaders = [
        FastDataLoader(x[mine], y[mine], num_labels=10, batch_size=setting.batch, shuffle=True)
        for mine in owners(setting)
    ]
    container = DummyDataContainer(loaders, [None] * len(loaders), None, 10)
    FlukeENV().set_seed(0)
    FlukeENV().set_inmemory(True)
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    params = DDict(
        client=DDict(
            batch_size=setting.batch,
            local_epochs=setting.epochs,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=setting.lr),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            persistency=False,
        ),
        server=DDict(weighted=True),
        model=net(setting.model),
    )
    algorithm = Counting(setting.clients, DataSplitter(container), params)
    algorithm.finalize = lambda: None  # skip the evaluation of all clients after the last round
    algorithm.run(clock.rounds, setting.invited / setting.clients, finalize=False)
    clock.report(final_loss(algorithm.server.model, setting))


if __name__ == "__main__":
    main()
