"""Do the work of ``work.py`` with pfl-research: FederatedAveraging, SimulatedBackend and a Dataset of tensors."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import Clock, final_loss, net, owners, parse, tensors


def main() -> None:
    _, setting = parse()
    np.random.seed(0)  # noqa: NPY002  pfl draws from it
    clock = Clock(setting)
    x, y = tensors(setting)
    parts = owners(setting)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(setting.model)

        def loss(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:
            clock.trained(1, len(labels))
            return F.cross_entropy(self.net(inputs), labels)

        def metrics(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> dict[str, object]:
            return {}

    class Rounds(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Metrics, model: object, *, central_iteration: int):
            clock.round_over()
            return False, Metrics()

    class Shuffled(Dataset):
        """A data set whose batches have a new random order in every epoch, as in other libraries."""

        def iter(self, batch_size: int | None):
            inputs, labels = self.raw_data
            order = torch.randperm(len(labels))
            for part in order.split(batch_size or len(labels)):
                yield inputs[part], labels[part]

    module = Module()
    users = {str(k): (x[mine], y[mine]) for k, mine in enumerate(parts)}
    federated = FederatedDataset(
        lambda user: Shuffled(raw_data=users[user], user_id=user),
        get_user_sampler("minimize_reuse", list(users)),
    )
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=clock.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=setting.invited,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=federated),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=setting.epochs, local_learning_rate=setting.lr, local_batch_size=setting.batch
        ),
        model_eval_params=None,
        callbacks=[Rounds()],
    )
    clock.report(final_loss(module.net, setting))


if __name__ == "__main__":
    main()
