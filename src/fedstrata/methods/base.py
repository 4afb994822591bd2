"""What a method is, and the recipe that most methods are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import field_validator, model_validator

from fedstrata.aggregation.base import AGGREGATORS, Aggregator, MeanBySize
from fedstrata.config import Registry, Setting, under
from fedstrata.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, FitReply, Params, Weights
from fedstrata.nn.batchnorm import has_batchnorm
from fedstrata.objectives.base import OBJECTIVES, CrossEntropy, Objective
from fedstrata.records import Tree, record
from fedstrata.sampling.base import CLIENT_SAMPLERS, DATA_SAMPLERS, AllData, ClientSampler, DataSampler, Uniform


class Method(Setting):
    """A federated method: ordinary Python on the server that asks clients typed questions.

    Its settings are its fields. Its state is one record with at least ``weights``, the global model, and goes through
    ``run_round`` explicitly.
    """

    paper: ClassVar[str] = ""
    """Where it comes from."""

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """How clients answer requests of the method's own: functions marked with ``fedstrata.clients.handling``."""

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Its own handlers and those of its choices."""
        return self.handlers

    def objective_in_use(self) -> Objective:
        """What clients minimise when they train locally."""
        return CrossEntropy()

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` where the settings do not fit the federation."""

    @abstractmethod
    def init(self, federation: Federation, weights: Weights) -> Any:
        """The state before the first round; clients may be asked (round 0)."""

    @abstractmethod
    def run_round(self, federation: Federation, state: Any) -> tuple[Any, dict[str, Any]]:
        """One round: the new state and what the method adds to the round's metrics."""

    def evaluated(self, config: FederationConfig, state: Any) -> Weights:
        """The model that is evaluated, and that a run leaves behind: ``state.weights`` unless a method prepares it."""
        weights: Weights = state.weights
        return weights


@record
class RecipeState:
    """The state of a recipe: the global model and what each of the four choices remembers.

    Args:
        weights: The global model.
        clients: The client sampler's.
        data: The data sampler's.
        objective: The objective's, at the server.
        aggregator: The aggregator's.
    """

    weights: Weights
    clients: Tree
    data: Tree
    objective: Tree
    aggregator: Tree


class Recipe(Method):
    """A method that is four choices. Each may be replaced from a spec, by name or by a table with settings.

    Args:
        client_sampler: Who takes part.
        data_sampler: Which of its samples a client uses.
        objective: What a client minimises.
        aggregator: How the server combines.
    """

    client_sampler: ClientSampler | None = None
    data_sampler: DataSampler | None = None
    objective: Objective | None = None
    aggregator: Aggregator | None = None

    @field_validator("client_sampler", mode="before")
    @classmethod
    def _client_sampler(cls, value: object) -> object:
        return value if value is None else under("client_sampler", lambda: CLIENT_SAMPLERS.parse(value))

    @field_validator("data_sampler", mode="before")
    @classmethod
    def _data_sampler(cls, value: object) -> object:
        return value if value is None else under("data_sampler", lambda: DATA_SAMPLERS.parse(value))

    @field_validator("objective", mode="before")
    @classmethod
    def _objective(cls, value: object) -> object:
        return value if value is None else under("objective", lambda: OBJECTIVES.parse(value))

    @field_validator("aggregator", mode="before")
    @classmethod
    def _aggregator(cls, value: object) -> object:
        return value if value is None else under("aggregator", lambda: AGGREGATORS.parse(value))

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> Self:
        """A setting that belongs to a choice which was replaced would have no effect."""
        defaults = ("client_sampler", "data_sampler", "objective", "aggregator")
        replaced = {choice for choice in defaults if getattr(self, choice) is not None}
        for key in sorted(self.model_fields_set - set(defaults)) if replaced else ():
            usual = self.model_copy(update={key: type(self).model_fields[key].get_default(call_default_factory=True)})
            shaped = {c for c in defaults if getattr(self, f"default_{c}")() != getattr(usual, f"default_{c}")()}
            if shaped and shaped <= replaced:
                choice = min(shaped)
                problem = f"has no effect: it belongs to the method's own {choice}, which is replaced; set it there"
                raise SpecError(key, problem, getattr(self, key))
        return self

    # What a named method sets; a spec's own choice goes first.

    def default_client_sampler(self) -> ClientSampler:
        """The method's own client sampler."""
        return Uniform()

    def default_data_sampler(self) -> DataSampler:
        """The method's own data sampler."""
        return AllData()

    def default_objective(self) -> Objective:
        """The method's own objective."""
        return CrossEntropy()

    def default_aggregator(self) -> Aggregator:
        """The method's own aggregation."""
        return MeanBySize()

    def choices(self) -> tuple[ClientSampler, DataSampler, Objective, Aggregator]:
        """The four choices in use."""
        return (
            self.client_sampler or self.default_client_sampler(),
            self.data_sampler or self.default_data_sampler(),
            self.objective or self.default_objective(),
            self.aggregator or self.default_aggregator(),
        )

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Its own handlers and those of its choices."""
        return self.handlers + tuple(function for choice in self.choices() for function in choice.handlers)

    def objective_in_use(self) -> Objective:
        """What clients minimise."""
        return self.choices()[2]

    def check(self, config: FederationConfig) -> None:
        """Each choice against the federation, and against the others."""
        sampler, data, objective, aggregator = self.choices()
        sampler.check(config)
        data.check(config)
        objective.check(config)
        aggregator.check(config, sampler)
        if data.private:
            self._check_private(config)

    def _check_private(self, config: FederationConfig) -> None:
        """Nothing may tell the sizes that clients keep private."""
        sampler, _, objective, aggregator = self.choices()
        if sampler.tells_sizes:
            raise SpecError("method.client_sampler", "asks for sizes that clients keep private; use another")
        if aggregator.needs_counts:
            accepted = "'mean', 'stratum' or 'horvitz-thompson'"
            raise SpecError("method.aggregator", f"weighs by sizes that clients keep private; use {accepted}")
        if objective.tells_counts(config):
            problem = "tells sizes that clients keep private; use another"
            if not objective.tells_counts(
                replace(config, training=config.training.model_copy(update={"local_steps": 1}))
            ):
                problem += ", or training.local_steps, the same for all"
            raise SpecError("method.objective", problem, objective.name)
        decays = config.training.weight_decay > 0
        if config.training.local_steps is None and (decays or has_batchnorm(config.model.module)):
            why = "weight decay" if decays else "BatchNorm's running statistics"
            problem = (
                f"with epochs {why} would tell how many steps a client took, and with them its size, which it keeps "
            )
            raise SpecError("training.local_steps", problem + "private; give a number of steps, the same for all")

    def init(self, federation: Federation, weights: Weights) -> RecipeState:
        """Every choice's own beginning."""
        sampler, data, objective, _ = self.choices()
        return RecipeState(
            weights=weights,
            clients=sampler.init(federation),
            data=data.init(federation),
            objective=objective.init(weights, federation.config),
            aggregator=None,
        )

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """Select, sample, train, combine."""
        sampler, data, objective, aggregator = self.choices()
        config, weights = federation.config, state.weights
        selection, clients_state = sampler.select(federation, state.clients, weights)
        invited = selection.clients.tolist()
        keep, data_state, data_metrics = data.keep(federation, state.data, invited)

        message, counts = objective.message(state.objective), not data.private
        expected = objective.expected(weights, config)
        request = Fit(federation.round, weights, message, keep, **effort(config), counts=counts, expected=expected)
        replies = federation.ask(dict.fromkeys(invited, request))

        combined, aggregator_state = aggregator.combine(weights, state.aggregator, selection, replies)
        # A server optimiser with weight decay would move even what no client trains.
        frozen = {n: w for n, w in weights.params.items() if not objective.trains(n, config.model)}
        combined = Weights(combined.params | frozen, combined.buffers) if frozen else combined
        answers = list(replies.values())
        objective_state, after = objective.server_update(state.objective, weights, combined, answers, config.clients)
        state = RecipeState(
            weights=after,
            clients=sampler.observe(clients_state, replies),
            data=data_state,
            objective=objective_state,
            aggregator=aggregator_state,
        )
        return state, {
            **training_metrics(answers),
            **selection.metrics,
            **data_metrics,
            **objective.metrics(answers),
            **diversity_of(answers, config),
        }


def effort(config: FederationConfig) -> dict[str, Any]:
    """What a request says about the work that local training takes, for simulated time."""
    training = config.training
    return {
        "passes": float(training.epochs),
        "steps": training.local_steps or 0,
        "batch_size": training.batch_size,
    }


def training_metrics(answers: list[FitReply]) -> dict[str, Any]:
    """Who trained, the samples that they saw, and the mean loss.

    A client's loss is the mean over its steps; over the clients it is weighted by the samples that they saw. Where
    clients keep their counts private, the samples are 0 and the loss is the mean over the clients, without those whose
    loss is exactly 0: they kept no sample.
    """
    seen = sum(reply.seen for reply in answers)
    weights = [reply.seen if seen else int(reply.loss != 0) for reply in answers]
    loss = None
    if any(weights):
        loss = sum(w * reply.loss for w, reply in zip(weights, answers, strict=True)) / sum(weights)
    return {"clients_trained": len(answers), "samples": seen, "train_loss": loss}


def diversity_of(answers: Sequence[FitReply], config: FederationConfig) -> dict[str, Any]:
    """``weight_diversity`` of the models that came back, where it was asked for."""
    return weight_diversity([reply.weights.params for reply in answers]) if config.weight_diversity else {}


def weight_diversity(models: Sequence[Params]) -> dict[str, Any]:
    """Λ = mean_k ‖w_k − w̄‖² with w̄ the plain mean of the clients' parameters (ReBaFL, Eq. 24); None for no client.

    >>> weight_diversity([{"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([2.0, 1.0])}])
    {'weight_diversity': 1.0}
    """
    if not models:
        return {"weight_diversity": None}
    total = 0.0
    for name in models[0]:
        stacked = torch.stack([params[name] for params in models])
        total += float((stacked - stacked.mean(dim=0)).square().sum(dtype=torch.float64))
    return {"weight_diversity": total / len(models)}


METHODS: Registry[Method] = Registry(
    "method",
    Method,  # type: ignore[type-abstract]
    {
        "fedavg": "fedstrata.methods.fedavg:FedAvg",
        "fedprox": "fedstrata.methods.fedprox:FedProx",
        "scaffold": "fedstrata.methods.scaffold:SCAFFOLD",
        "fedsts": "fedstrata.methods.fedstas:FedSTS",
        "fedstas": "fedstrata.methods.fedstas:FedSTaS",
        "fedsampling": "fedstrata.methods.fedsampling:FedSampling",
        "fedssar": "fedstrata.methods.fedssar:FedSSAR",
        "clustered": "fedstrata.methods.clustered:ClusteredSampling",
        "power-of-choice": "fedstrata.methods.power_of_choice:PowerOfChoice",
        "stratify": "fedstrata.stratify.method:Stratify",
        "sfl": "fedstrata.methods.sfl:SFL",
        "fedtan": "fedstrata.methods.fedtan:FedTAN",
        "rebafl": "fedstrata.methods.rebafl:ReBaFL",
        "feddyn": "fedstrata.methods.feddyn:FedDyn",
        "moon": "fedstrata.methods.moon:MOON",
        "fedrs": "fedstrata.methods.fedrs:FedRS",
        "fedlc": "fedstrata.methods.fedlc:FedLC",
        "fedbabu": "fedstrata.methods.fedbabu:FedBABU",
        "bsm-fedavg": "fedstrata.methods.bsm:BSMFedAvg",
        "fedavg-ft": "fedstrata.methods.fedavg_ft:FedAvgFT",
    },
)
