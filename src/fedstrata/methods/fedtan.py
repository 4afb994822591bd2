"""FedTAN (Wang et al. 2023): FedAvg with BatchNorm statistics that are averaged over the clients once per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.clients.handlers.fedtan import FitTogether
from fedstrata.federation.allowed import Agreed, Allowed, SampleLimit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.methods.recipe import Recipe
from fedstrata.objectives.base import CrossEntropy
from fedstrata.sampling.base import AllData


class FedTAN(Recipe):
    """FedAvg in which clients jointly compute BatchNorm statistics in the first local step of a round.

    In the first step, every BatchNorm layer normalises with means and variances that are averaged over the round's
    clients. In the backward pass, the gradients of the mean and of the variance are also averaged. Therefore, in each
    pass, clients send one message per BatchNorm layer to the server, and receive a reply. Later local steps and the
    global model use these statistics unchanged. The clients of a round train at the same time. If a client fails in the
    first step, the round does not change the model.

    Only the data sampler ``all``, the objective ``cross-entropy`` and the optimiser ``sgd`` are accepted.
    """

    needs_replies = "adds up statistics between clients in the middle of a step"
    needs_sgd = "FedTAN's clients take the first SGD step together, and each of them uses one batch"

    paper = "Wang et al. 2023, Why Batch Normalization Damage FL on Non-IID Data? (IEEE TNNLS)"

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the model has no BatchNorm layers, or if a setting is not compatible with FedTAN."""
        super().check(config)
        if not config.model.has_batchnorm:
            problem = (
                "FedTAN requires a model with BatchNorm layers. Without such layers, fedavg computes "
                "the same model. Use fedavg."
            )
            raise SpecError("method.name", problem, "fedtan")
        if config.training.batch_norm == "local":
            problem = "FedTAN averages BatchNorm statistics over clients. Set training.batch_norm = 'average'."
            raise SpecError("training.batch_norm", problem, "local")
        if self.aggregator.own_starts:
            problem = "FedTAN requires that all clients start from the same model. Use another aggregator."
            raise SpecError("method.aggregator", problem, self.aggregator.name)
        for key, accepted in (("data_sampler", AllData()), ("objective", CrossEntropy())):
            if getattr(self, key) != accepted:
                raise SpecError(f"method.{key}", "FedTAN always trains on all data with cross-entropy. Remove the key.")

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the client sampler's requests, and the request that asks the clients of a round to train together."""
        size = agreed.training.batch_size
        reason = f"uses a batch, which has at most training.batch_size = {size} samples"
        return self.with_samplers(agreed, Allowed(FitTogether, limit=SampleLimit(size, reason)))

    @override
    def train_clients(
        self,
        federation: Federation,
        clients: Sequence[int],
        request: Fit,
        starts: Mapping[int, Weights] | None = None,
    ) -> dict[int, FitReply]:
        together, work = FitTogether(request.round, request.weights), federation.config.training.sample_gradients
        return federation.ask(clients, together, together=True, work=work)
