"""Do the work of ``work.py`` with fedstrata, through its public interface."""

from __future__ import annotations

from typing import Any

from work import Clock, Setting, arrays, final_loss, named, net, owners, parse

import fedstrata as fs
from fedstrata.data.partitions.base import Assignment


def main() -> None:
    _, setting = parse()
    clock = Clock(setting)

    def over(record: dict[str, Any]) -> None:
        clock.trained(record["samples"] // setting.batch, record["samples"])
        clock.round_over()

    spec = fs.Experiment(
        partition=partition_of(setting),
        method=fs.FedAvg(),
        model=model_of(setting),
        training=fs.Training(
            rounds=clock.rounds,
            clients_per_round=setting.invited,
            local_epochs=setting.epochs,
            batch_size=setting.batch,
            lr=setting.lr,
        ),
        evaluation=fs.Evaluation(every=0),
    )
    x, y = arrays(setting.data)
    # fedstrata always evaluates the last round; 100 samples keep this short, because other libraries do not evaluate.
    data = fs.from_arrays(x, y, x[:100], y[:100], normalize="unit")
    # All libraries start with the same parameters.
    model = named(spec.model.build(data.shape, data.outputs), net(setting.model).state_dict())
    history = fs.run(spec, data=data, model=model, callbacks=[over])
    clock.report(final_loss(named(net(setting.model), history.params), setting))


def partition_of(setting: Setting) -> fs.Partition:
    """Return a partition with the clients that ``work.py`` defines."""

    class Given(fs.Partition):
        def split(self, dataset: fs.Dataset, seed: int) -> Assignment:
            return Assignment.from_lists(owners(setting))

        def assign(self, labels: Any, domains: Any, rng: Any) -> Any:
            raise NotImplementedError

    return Given(clients=setting.clients)


def model_of(setting: Setting) -> Any:
    from fedstrata.models.zoo import CNN, MLP, Custom

    if setting.model == "cnn2":
        return Custom(factory="fedstrata_run:two_convolutions")
    return MLP() if setting.model == "mlp" else CNN()


def two_convolutions(shape: tuple[int, ...], classes: int) -> Any:
    """Build the model ``cnn2``, as a user's own model."""
    return net("cnn2")


if __name__ == "__main__":
    main()
