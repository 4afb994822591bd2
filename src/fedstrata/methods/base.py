"""``Method``, the base class of all methods, and ``Recipe``, for combinations of samplers, objective and aggregator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, get_args

import torch
from pydantic import model_validator

from fedstrata.aggregation.base import Aggregator, AnyAggregator, MeanBySize
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import SHARE, Agreed, Allowed, declares, joined, step_limit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fact, Fit, FitReply, Params, Weights, check_message
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.objectives.base import AnyObjective, CrossEntropy, Objective
from fedstrata.sampling.base import AllData, AnyClientSampler, AnyDataSampler, ClientSampler, DataSampler, Uniform

ASKING = {
    "method": ("run_round", "train_clients", "init", "handlers"),
    "client_sampler": ("select", "init", "handlers"),
    "data_sampler": ("keep", "init", "handlers"),
    "objective": ("client_final", "handlers"),
}
"""The Python methods and attributes of each kind of class that decide which requests clients get, or what they reply.

A subclass that overrides one of them must also override its declaration of requests: ``allowed``, or ``sends`` in an
objective.
"""


class Method(Setting):
    """A federated method: Python code that runs on the server and sends typed requests to clients.

    The fields are the method's settings. The state, which changes from round to round, is a record with at least the
    field ``weights``, the global model. ``init`` returns the first state; ``run_round`` takes a state and returns the
    next one.
    """

    paper: ClassVar[str] = ""
    """The paper that defines the method."""

    needs_sgd: ClassVar[str] = ""
    """The reason why the method takes its own steps of SGD, each on one batch, as a sentence without a full stop.

    It is empty if clients train as ``training`` says. See also ``Objective.needs_sgd``.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that answer the method's own requests at a client; see ``fedstrata.clients.handling``."""

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions that answer all requests of the method, including those of a recipe's choices."""
        return self.handlers

    needs_strata: ClassVar[bool] = False
    """Whether each sample must belong to a stratum, such as its class or a range of targets."""

    def objective_in_use(self) -> Objective:
        """Return the objective that clients minimise in local training."""
        return CrossEntropy()

    def personal_objective(self) -> Objective:
        """Return the objective of a client that personalises the global model (``evaluation.fine_tune``)."""
        return CrossEntropy()

    def asks_for_changes(self) -> bool:
        """Return True if clients answer with changes of the model that they received, which codecs may compress."""
        return False

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests that the method may send, with their bounds; real sites refuse all others.

        None means that the requests are not declared: the method then runs only in simulations. A subclass that
        overrides one of the methods in ``ASKING`` must override ``allowed`` as well.
        """
        return None

    def declared(self, agreed: Agreed) -> list[Allowed] | None:
        """Return ``allowed``; None if a subclass overrides a method in ``ASKING`` but not ``allowed``."""
        return self.allowed(agreed) if declares(type(self), "allowed", *ASKING["method"]) else None

    @property
    def conceals(self) -> frozenset[Fact]:
        """The facts about clients that the method keeps private; evaluations must not disclose them either."""
        return frozenset()

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the settings do not fit the federation."""

    @abstractmethod
    def init(self, federation: Federation, weights: Weights) -> Any:
        """Return the state before the first round. Requests that a method sends here belong to round 0."""

    @abstractmethod
    def run_round(self, federation: Federation, state: Any) -> tuple[Any, dict[str, Any]]:
        """Run one round; return the new state and the method's metrics of the round."""

    def evaluated(self, config: FederationConfig, state: Any) -> Weights:
        """Return the model to evaluate, and to save at the end of a run. Default: ``state.weights``."""
        weights: Weights = state.weights
        return weights


@record("RecipeState")
class RecipeState:
    """The state of a recipe: the global model and the state of each of the four choices.

    Args:
        weights: The global model.
        clients: The client sampler's state.
        data: The data sampler's state.
        objective: The objective's state at the server.
        aggregator: The aggregator's state.
    """

    weights: Weights
    clients: Tree
    data: Tree
    objective: Tree
    aggregator: Tree


class Parts(TypedDict, total=False):
    """The choices in which a recipe differs from FedAvg. Choices that equal those of FedAvg are missing."""

    client_sampler: ClientSampler
    data_sampler: DataSampler
    objective: Objective
    aggregator: Aggregator


Choice = Literal["client_sampler", "data_sampler", "objective", "aggregator"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
"""The names of a recipe's four choices, in the order in which a round uses them."""


class Recipe(Method):
    """A method that consists of four choices. A spec may replace each choice by a name or by a table of settings.

    A subclass overrides ``parts``, which builds the choices that differ from FedAvg's from the subclass's settings. If
    a spec replaces all choices that a setting affects, it must not contain the setting.

    Args:
        client_sampler: How the clients of a round are chosen.
        data_sampler: How a client's samples for a round are chosen.
        objective: Loss that clients minimise.
        aggregator: How the server combines the clients' models.

    >>> from pydantic import Field
    >>> from fedstrata.objectives.fedprox import Proximal
    >>> class Pulled(Recipe):
    ...     mu: float = Field(0.5, ge=0)
    ...     def parts(self):
    ...         return {"objective": Proximal(mu=self.mu)}
    >>> Pulled().objective, Pulled(mu=0.1).objective
    (Proximal(mu=0.5), Proximal(mu=0.1))
    """

    renamed: ClassVar[Mapping[str, str]] = {}
    """A mapping from a setting's name in the method to its name in a choice, for settings whose two names differ."""

    client_sampler: AnyClientSampler = Uniform()
    data_sampler: AnyDataSampler = AllData()
    objective: AnyObjective = CrossEntropy()
    aggregator: AnyAggregator = MeanBySize()

    def parts(self) -> Parts:
        """Return the choices in which the method differs from FedAvg, built from the method's settings."""
        return {}

    def shared_settings(self) -> dict[str, tuple[Choice, str]]:
        """Find the method's settings that ``parts`` passes on to a choice.

        Returns:
            A mapping from the setting's name in the method to the choice and the setting's name in it.
        """
        names = {key: self.renamed.get(key, key) for key in type(self).model_fields if key not in CHOICES}
        return {
            key: (choice, name)
            for choice, part in self._checked_parts().items()
            for key, name in names.items()
            if name in type(part).model_fields
        }

    def _checked_parts(self) -> dict[Choice, Setting]:
        """Return ``parts``; raise ``TypeError`` if it contains an unknown choice, or an object of another class."""
        parts: Any = self.parts()
        for choice, part in parts.items():
            if choice not in CHOICES:
                raise TypeError(f"{type(self).__name__}.parts: {choice!r} is not a choice of {', '.join(CHOICES)}")
            expected: Any = Recipe.model_fields[choice].annotation
            if not isinstance(part, expected):
                problem = f"{choice} = {part!r} is not an instance of {expected.__name__}"
                raise TypeError(f"{type(self).__name__}.parts: {problem}")
        return dict(parts)

    def _defaults(self) -> dict[str, Any]:
        """Return the default of each optional setting of the method, without the four choices."""
        return {
            key: field.get_default(call_default_factory=True)
            for key, field in type(self).model_fields.items()
            if key not in CHOICES and not field.is_required()
        }

    @model_validator(mode="after")
    def _set_parts(self) -> Self:
        """Set the choices that the spec does not replace, and refuse settings that affect only replaced choices."""
        parts, given, defaults = self._checked_parts(), self.model_fields_set, self._defaults()
        replaced = given.intersection(CHOICES)
        for key in sorted(given & defaults.keys()) if replaced else ():
            # A setting affects the choices that would be different if the setting had its default value.
            usual = self.model_copy(update={key: defaults[key]})._checked_parts()
            affected = {choice for choice in parts.keys() | usual.keys() if parts.get(choice) != usual.get(choice)}
            if affected and affected <= replaced:
                problem = f"has no effect, because method.{min(affected)} is replaced. Set the key there."
                raise SpecError(key, problem, getattr(self, key))
        for choice in parts.keys() - replaced:
            object.__setattr__(self, choice, parts[choice])
        return self

    def to_spec(self) -> dict[str, Any]:
        """Return the settings that have an effect, and the replaced choices; parsing them gives an equal method."""
        given, defaults = self.model_fields_set, self._defaults()
        of_replaced = [key for key, (choice, _) in self.shared_settings().items() if choice in given]
        omitted = {key for key in of_replaced if getattr(self, key) == defaults.get(key, ...)} | set(CHOICES) - given
        return {key: value for key, value in super().to_spec().items() if key not in omitted}

    def choices(self) -> tuple[ClientSampler, DataSampler, Objective, Aggregator]:
        """Return the four choices in use."""
        return self.client_sampler, self.data_sampler, self.objective, self.aggregator

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions with which clients answer the requests of the method and of its four choices."""
        return self.handlers + tuple(function for choice in self.choices() for function in choice.handlers)

    def objective_in_use(self) -> Objective:
        """Return the objective that clients minimise in local training."""
        return self.objective

    def asks_for_changes(self) -> bool:
        """Return True: clients answer with changes of the model that they received."""
        return True

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests of the samplers and of local training; None if a choice does not declare its requests."""
        _, data, objective, _ = self.choices()
        kept = data.fixed_share
        where = {"keep": SHARE if kept is None else kept, "counts": not data.private}
        counts = "" if data.private else ", with how many samples it used and their mean loss"
        message = f"; and {objective.sends}" if objective.sends else ""
        sizes: frozenset[Fact] = frozenset(() if data.private else ("sizes",))
        description = f"{Fit.rule.description}{counts}{message}"
        rule = replace(Fit.rule, description=description, discloses=objective.discloses | sizes)
        return self.with_samplers(agreed, Allowed(Fit, where=where, limit=step_limit(agreed), rule=rule))

    def with_samplers(self, agreed: Agreed, training: Allowed) -> list[Allowed] | None:
        """Return the samplers' requests and the request ``training``; None if a choice does not declare requests."""
        parts = [
            choice.allowed(agreed) if declares(type(choice), "allowed", *ASKING[name]) else None
            for name, choice in (("client_sampler", self.client_sampler), ("data_sampler", self.data_sampler))
        ]
        known = declares(type(self.objective), "sends", *ASKING["objective"])
        return joined(*parts, [training] if known else None)

    @property
    def conceals(self) -> frozenset[Fact]:
        """``sizes`` (how many samples each client has), if the data sampler keeps them private."""
        return frozenset({"sizes"} if self.data_sampler.private else ())

    def check(self, config: FederationConfig) -> None:
        """Check each choice against the federation and the other choices."""
        sampler, data, objective, aggregator = self.choices()
        sampler.check(config)
        data.check(config)
        objective.check(config)
        aggregator.check(config, sampler)
        if data.private:
            self._check_private(config)

    def _check_private(self, config: FederationConfig) -> None:
        """Refuse settings that would disclose the sizes that clients keep private."""
        sampler, _, objective, aggregator = self.choices()
        sampler.check_private(config)
        if aggregator.needs_counts:
            accepted = "'mean', 'stratum', 'horvitz-thompson' or a robust aggregator"
            raise SpecError(
                "method.aggregator",
                "weights models by the clients' numbers of samples, but method.data_sampler keeps them "
                f"private. Use {accepted}.",
            )
        if objective.tells_counts(config):
            problem = (
                "discloses the clients' numbers of samples, but method.data_sampler keeps them private. Use "
                "another objective."
            )
            by_steps = replace(config, training=config.training.model_copy(update={"local_steps": 1}))
            if not objective.tells_counts(by_steps):
                problem = problem.removesuffix(".") + ", or set training.local_steps."
            raise SpecError("method.objective", problem, objective.name)
        decays, adaptive = config.training.weight_decay > 0, not config.training.optimizer.is_sgd
        if config.training.local_steps is None and (decays or adaptive or has_batchnorm(config.model.module)):
            why = "weight decay" if decays else "BatchNorm's running statistics"
            why = "the length of an optimiser's steps" if adaptive else why
            problem = (
                f"is required, because with epochs, {why} would disclose a client's size, which data_sampler keeps "
            )
            raise SpecError("training.local_steps", f"{problem}private. Set it to a number of steps for all clients.")

    def init(self, federation: Federation, weights: Weights) -> RecipeState:
        """Return the initial state of every choice."""
        sampler, data, objective, aggregator = self.choices()
        return RecipeState(
            weights=weights,
            clients=sampler.init(federation),
            data=data.init(federation),
            objective=objective.init(weights, federation.config),
            aggregator=aggregator.init(federation.config),
        )

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """Select clients, train them, and combine their models."""
        sampler, data = self.client_sampler, self.data_sampler
        objective, aggregator = self.objective, self.aggregator
        config, weights = federation.config, state.weights
        selection, clients_state = sampler.select(federation, state.clients, weights)
        selection = replace(selection, round=federation.round, rounds=config.training.rounds)
        invited = selection.clients.tolist()
        keep, data_state, data_metrics = data.keep(federation, state.data, invited)

        request = Fit(federation.round, weights, objective.message(state.objective), keep, counts=not data.private)
        replies = self.train_clients(federation, invited, request)
        combined, aggregator_state = aggregator.combine(weights, state.aggregator, selection, replies)
        if combined is weights and (reason := aggregator.shortage(len(replies))):
            federation.note("too few replies", replies, reason)
        # Restore parameters that clients do not train or send: a server optimiser with weight decay would change them.
        model = config.model
        frozen = {
            n: w
            for n, w in weights.params.items()
            if not objective.trains(n, model) or (objective.has_stages and objective.stays(n, model))
        }
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
            **({} if config.privacy.dp is None else {"train_loss": None}),
            **selection.metrics,
            **data_metrics,
            **objective.metrics(answers),
            **(weight_diversity([reply.weights.params for reply in answers]) if config.weight_diversity else {}),
        }

    def train_clients(self, federation: Federation, clients: Sequence[int], request: Fit) -> dict[int, FitReply]:
        """Ask the invited clients to train, and return their replies."""
        objective, training = self.objective, federation.config.training
        expected = objective.expected(request.weights, federation.config)
        computes_more = objective.has_stages or objective.gradients_per_step > 1
        work = partial(objective.sample_gradients, training) if computes_more else training.sample_gradients
        return federation.ask(
            clients,
            request,
            work=partial(work, keep=request.keep),
            check=partial(check_message, expected=expected),
        )


def training_metrics(answers: list[FitReply]) -> dict[str, Any]:
    """Return how many clients trained, the number of sample-gradients that they computed, and their mean loss.

    A client's loss is the mean over its steps; the mean over clients is weighted by their sample-gradients. If clients
    keep these counts private, they are 0, and the loss is the plain mean over the clients that took a step.
    """
    seen = sum([reply.seen for reply in answers])
    weights = [reply.seen if seen else int(reply.trained) for reply in answers]
    loss = None
    if any(weights):
        loss = sum([w * reply.loss for w, reply in zip(weights, answers, strict=True)]) / sum(weights)
    return {"clients_trained": len(answers), "samples": seen, "train_loss": loss}


def weight_diversity(models: Sequence[Params]) -> dict[str, Any]:
    """Return Λ = mean_k ‖w_k − w̄‖² with the mean w̄ of the clients' models w_k (ReBaFL, Eq. 24); None without models.

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
        "fedper": "fedstrata.methods.fedper:FedPer",
        "fedntd": "fedstrata.methods.fedntd:FedNTD",
        "fedrep": "fedstrata.methods.fedrep:FedRep",
        "ditto": "fedstrata.methods.ditto:Ditto",
        "feddecorr": "fedstrata.methods.feddecorr:FedDecorr",
        "fedvls": "fedstrata.methods.fedvls:FedVLS",
        "fedsam": "fedstrata.methods.fedsam:FedSAM",
        "fedlesam": "fedstrata.methods.fedlesam:FedLESAM",
        "fedentopt": "fedstrata.methods.fedentopt:FedEntOpt",
        "fedgs": "fedstrata.methods.fedgs:FedGS",
        "bsm-fedavg": "fedstrata.methods.bsm:BSMFedAvg",
        "fedavg-ft": "fedstrata.methods.fedavg_ft:FedAvgFT",
        "fedau": "fedstrata.methods.fedau:FedAU",
        "mifa": "fedstrata.methods.mifa:MIFA",
        "fedvarp": "fedstrata.methods.fedvarp:FedVARP",
    },
)

AnyMethod = Annotated[Method, FromRegistry(METHODS, default="fedavg")]
