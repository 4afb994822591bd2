"""Recipes: methods that combine a client sampler, a data sampler, an objective and an aggregator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args

import torch
from pydantic import model_validator

from fedstrata.aggregation.base import Aggregator, AnyAggregator, MeanBySize
from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import SHARE, Agreed, Allowed, declares, joined, step_limit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fact, Fit, FitReply, Params, Requests, Weights, check_message
from fedstrata.federation.secure.fit import Forms
from fedstrata.methods.base import ASKING, Method
from fedstrata.methods.private import noisy_form, private_round
from fedstrata.methods.secure import fit_form, secure_round
from fedstrata.objectives.base import AnyObjective, CrossEntropy, Objective
from fedstrata.sampling.base import AllData, AnyClientSampler, AnyDataSampler, ClientSampler, DataSampler, Uniform


@record("RecipeState")
class RecipeState:
    """The state of a recipe: the global model, and the states of the samplers, the objective and the aggregator.

    Args:
        weights: The global model.
        clients: The client sampler's state.
        data: The data sampler's state.
        objective: The objective's state on the server.
        aggregator: The aggregator's state.
    """

    weights: Weights
    clients: Tree
    data: Tree
    objective: Tree
    aggregator: Tree


class Parts(TypedDict, total=False):
    """The components of a recipe that differ from FedAvg's."""

    client_sampler: ClientSampler
    data_sampler: DataSampler
    objective: Objective
    aggregator: Aggregator


Choice = Literal["client_sampler", "data_sampler", "objective", "aggregator"]


CHOICES: tuple[Choice, ...] = get_args(Choice)
"""The names of a recipe's four components (two samplers, an objective, an aggregator), in the order of use."""


class Recipe(Method):
    """A method that combines a client sampler, a data sampler, an objective and an aggregator.

    In a spec, a name or a table of settings can replace each of these four components.

    A subclass overrides ``parts``, which returns the components that differ from FedAvg's. If a spec replaces all
    components that a setting affects, the spec must not contain this setting.

    Args:
        client_sampler: Client sampler, which chooses the clients of each round.
        data_sampler: Data sampler, which chooses the samples that each client uses.
        objective: Objective: the loss that clients minimise.
        aggregator: Aggregator, which combines the clients' models.

    >>> from pydantic import Field
    >>> from fedstrata.objectives.fedprox import Proximal
    >>> class Pulled(Recipe):
    ...     mu: float = Field(0.5, ge=0)
    ...     def parts(self):
    ...         return {"objective": Proximal(mu=self.mu)}
    >>> Pulled().objective, Pulled(mu=0.1).objective
    (Proximal(mu=0.5), Proximal(mu=0.1))
    """

    needs_replies = ""

    renamed: ClassVar[Mapping[str, str]] = {}
    """A mapping from names of the method's settings to the names of the same settings in the components."""

    client_sampler: AnyClientSampler = Uniform()
    data_sampler: AnyDataSampler = AllData()
    objective: AnyObjective = CrossEntropy()
    aggregator: AnyAggregator = MeanBySize()

    def parts(self) -> Parts:
        """From the method's settings, build the samplers, objective and aggregator that differ from FedAvg's."""
        return {}

    def shared_settings(self) -> dict[str, tuple[Choice, str]]:
        """Return the method's settings that are passed on to a sampler, the objective or the aggregator.

        Returns:
            A mapping from a setting's name in the method to a pair: the component that uses the setting (such as
            ``objective``), and the setting's name in this component.
        """
        names = {key: self.renamed.get(key, key) for key in type(self).model_fields if key not in CHOICES}
        return {
            key: (choice, name)
            for choice, part in self._checked_parts().items()
            for key, name in names.items()
            if name in type(part).model_fields
        }

    def _checked_parts(self) -> dict[Choice, Setting]:
        """Return the result of ``parts``; raise ``TypeError`` for an unknown component or a wrong class."""
        parts: Any = self.parts()
        for choice, part in parts.items():
            if choice not in CHOICES:
                raise TypeError(f"{type(self).__name__}.parts: {choice!r} is not one of {', '.join(CHOICES)}")
            expected: Any = Recipe.model_fields[choice].annotation
            if not isinstance(part, expected):
                problem = f"{choice} = {part!r} is not an instance of {expected.__name__}"
                raise TypeError(f"{type(self).__name__}.parts: {problem}")
        return dict(parts)

    def _defaults(self) -> dict[str, Any]:
        """Return the default of each optional setting of the method, without the four components."""
        return {
            key: field.get_default(call_default_factory=True)
            for key, field in type(self).model_fields.items()
            if key not in CHOICES and not field.is_required()
        }

    @model_validator(mode="after")
    def _set_parts(self) -> Self:
        """Set the components that the spec does not replace.

        Raise an error for settings that affect only replaced components.
        """
        parts, given, defaults = self._checked_parts(), self.model_fields_set, self._defaults()
        replaced = given.intersection(CHOICES)
        for key in sorted(given & defaults.keys()) if replaced else ():
            # A setting affects a choice (such as the objective) if the setting's default would give a different choice.
            usual = self.model_copy(update={key: defaults[key]})._checked_parts()
            affected = {choice for choice in parts.keys() | usual.keys() if parts.get(choice) != usual.get(choice)}
            if affected and affected <= replaced:
                problem = (
                    f"has no effect, because the spec also sets method.{min(affected)}. Remove the key, or set it in "
                    f"method.{min(affected)}."
                )
                raise SpecError(key, problem, getattr(self, key))
        for choice in parts.keys() - replaced:
            object.__setattr__(self, choice, parts[choice])
        return self

    def to_spec(self) -> dict[str, Any]:
        """Return a section of a spec that recreates the method: the settings in effect and the replaced components."""
        given, defaults = self.model_fields_set, self._defaults()
        of_replaced = [key for key, (choice, _) in self.shared_settings().items() if choice in given]
        omitted = {key for key in of_replaced if getattr(self, key) == defaults.get(key, ...)} | set(CHOICES) - given
        return {key: value for key, value in super().to_spec().items() if key not in omitted}

    def choices(self) -> tuple[ClientSampler, DataSampler, Objective, Aggregator]:
        """Return the client sampler, data sampler, objective and aggregator in use."""
        return self.client_sampler, self.data_sampler, self.objective, self.aggregator

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Return the handlers of all requests that the method, its samplers, its objective and its aggregator send."""
        return self.handlers + tuple(function for choice in self.choices() for function in choice.handlers)

    def objective_in_use(self) -> Objective:
        """Return the objective that clients minimise in local training."""
        return self.objective

    def asks_for_changes(self) -> bool:
        """Return False if the aggregator lets clients start from different models, and True otherwise."""
        return not self.aggregator.own_starts

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests of the samplers and of local training; None if a component does not declare requests."""
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
        """Return the samplers' requests and the request ``training``; None if a component does not declare requests."""
        parts = [
            choice.allowed(agreed) if declares(type(choice), "allowed", *ASKING[name]) else None
            for name, choice in (("client_sampler", self.client_sampler), ("data_sampler", self.data_sampler))
        ]
        known = declares(type(self.objective), "sends", *ASKING["objective"])
        return joined(*parts, [training] if known else None)

    @property
    def conceals(self) -> frozenset[Fact]:
        """The set ``{"sizes"}`` if the data sampler hides the clients' numbers of samples; otherwise the empty set."""
        return frozenset({"sizes"} if self.data_sampler.private else ())

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the components are not compatible with the federation or with each other."""
        sampler, data, objective, aggregator = self.choices()
        sampler.check(config)
        data.check(config)
        objective.check(config)
        aggregator.check(config, sampler)
        if data.private:
            self._check_private(config)

    def _check_private(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` for settings that would disclose the numbers of samples that clients hide."""
        sampler, _, objective, aggregator = self.choices()
        sampler.check_private(config)
        if aggregator.needs_counts:
            accepted = "'mean', 'stratum', 'horvitz-thompson' or a robust aggregator"
            raise SpecError(
                "method.aggregator",
                "this aggregator needs the clients' numbers of samples, which method.data_sampler keeps "
                f"private. Use {accepted}.",
            )
        if objective.tells_counts(config):
            problem = (
                "discloses the clients' numbers of samples, which method.data_sampler keeps private. Use "
                "another objective."
            )
            by_steps = replace(config, training=config.training.model_copy(update={"local_steps": 1}))
            if not objective.tells_counts(by_steps):
                problem = problem.removesuffix(".") + ", or set training.local_steps."
            raise SpecError("method.objective", problem, objective.name)
        decays, adaptive = config.training.weight_decay > 0, not config.training.optimizer.is_sgd
        if config.training.local_steps is None and (decays or adaptive or config.model.has_batchnorm):
            why = "weight decay" if decays else "BatchNorm's running statistics"
            why = "the length of an optimiser's steps" if adaptive else why
            problem = (
                "is required, because method.data_sampler keeps the clients' numbers of samples private. With "
                f"local_epochs, {why} would disclose these numbers. "
            )
            raise SpecError("training.local_steps", f"{problem}Set a number of steps for all clients.")

    def init(self, federation: Federation, weights: Weights) -> RecipeState:
        """Return the initial global model, and the initial states of the samplers, the objective and the aggregator."""
        sampler, data, objective, aggregator = self.choices()
        return RecipeState(
            weights=weights,
            clients=sampler.init(federation),
            data=data.init(federation),
            objective=objective.init(weights, federation.config),
            aggregator=aggregator.init(federation.config),
        )

    def most_summed(self, config: FederationConfig) -> int:
        """Return the maximum number of clients that the client sampler invites per round."""
        return self.client_sampler.most_invited(config)

    def forms(self, config: FederationConfig) -> Forms:
        """Return the rules for secure sums of replies to the training request and to the data sampler's requests."""
        fit = fit_form if config.privacy.clients is None else noisy_form
        return {Fit: fit(self, config), **self.data_sampler.forms(config)}

    def frozen(self, config: FederationConfig) -> frozenset[str]:
        """Return the names of the parameters that clients do not train, or do not send."""
        objective, model = self.objective, config.model
        return frozenset(
            name
            for name in model.params()
            if not objective.trains(name, model) or (objective.has_stages and objective.stays(name, model))
        )

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """Select clients, train them, and combine their models."""
        if federation.config.privacy.clients is not None:
            return private_round(self, federation, state)
        if federation.config.privacy.sums == "secure":
            return secure_round(self, federation, state)
        sampler, data = self.client_sampler, self.data_sampler
        objective, aggregator = self.objective, self.aggregator
        config, weights = federation.config, state.weights
        selection, clients_state = sampler.select(federation, state.clients, weights)
        selection = replace(selection, round=federation.round, rounds=config.training.rounds)
        invited = selection.clients.tolist()
        keep, data_state, data_metrics = data.keep(federation, state.data, invited)

        request = Fit(federation.round, weights, objective.message(state.objective), keep, counts=not data.private)
        starts = aggregator.starts(weights, state.aggregator, invited) if aggregator.own_starts else None
        replies = self.train_clients(federation, invited, request, starts)
        combined, aggregator_state = aggregator.combine(weights, state.aggregator, selection, replies)
        if combined is weights and (reason := aggregator.shortage(len(replies))):
            federation.note("too few replies", replies, reason)
        if objective.freezes:
            combined = self.restored(config, weights, combined)
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

    def restored(self, config: FederationConfig, before: Weights, after: Weights) -> Weights:
        """Return the new model without the changes that weight decay made to frozen parameters."""
        frozen = {name: before.params[name] for name in self.frozen(config)}
        return Weights(after.params | frozen, after.buffers) if frozen else after

    def evaluated(self, config: FederationConfig, state: RecipeState) -> Weights:
        """Return the model that the aggregator chooses: the global model, or an average of several models."""
        return self.aggregator.evaluated(state.weights, state.aggregator)

    def train_clients(
        self,
        federation: Federation,
        clients: Sequence[int],
        request: Fit,
        starts: Mapping[int, Weights] | None = None,
    ) -> dict[int, FitReply]:
        """Ask the invited clients to train, and return the replies that arrived.

        Args:
            federation: The federation.
            clients: The invited clients.
            request: The request, which contains the global model.
            starts: The model from which each client starts; None if all clients start from the global model.
        """
        expected = self.objective.expected(request.weights, federation.config)
        return federation.ask(
            clients,
            request if starts is None else _starting_at(request, starts),
            work=self.work(federation.config, request.keep),
            check=partial(check_message, expected=expected),
        )

    def work(self, config: FederationConfig, keep: float) -> Callable[[int], float]:
        """Return a function that computes a client's number of per-sample gradients from its number of samples.

        Args:
            config: The settings that server and clients share.
            keep: The fraction of the samples that the client uses.
        """
        objective, training = self.objective, config.training
        computes_more = objective.has_stages or objective.gradients_per_step > 1
        work = partial(objective.sample_gradients, training) if computes_more else training.sample_gradients
        return partial(work, keep=keep)


def _starting_at(request: Fit, starts: Mapping[int, Weights]) -> Requests:
    """Return the requests to clients that start from different models.

    Clients with the same model get one shared request.
    """
    models = list({id(model): model for model in starts.values()}.values())
    place = {id(model): index for index, model in enumerate(models)}
    which = {client: place[id(model)] for client, model in starts.items()}
    return Requests([replace(request, weights=model) for model in models], which)


def training_metrics(answers: list[FitReply]) -> dict[str, Any]:
    """Return the number of clients that trained, their total number of per-sample gradients, and their mean loss.

    A client's loss is the mean over its steps. The mean over clients is weighted by the clients' numbers of per-sample
    gradients. If clients hide these numbers, the total is 0, and the loss is the unweighted mean over the clients that
    took a step.
    """
    seen = sum([reply.seen for reply in answers])
    weights = [reply.seen if seen else int(reply.trained) for reply in answers]
    loss = None
    if any(weights):
        loss = sum([w * reply.loss for w, reply in zip(weights, answers, strict=True)]) / sum(weights)
    return {"clients_trained": len(answers), "samples": seen, "train_loss": loss}


def weight_diversity(models: Sequence[Params]) -> dict[str, Any]:
    """Return the mean squared distance of the clients' models from their mean (ReBaFL, Eq. 24).

    With the models w_k and their mean w̄, the result is Λ = mean_k ‖w_k − w̄‖²; None without models.

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
