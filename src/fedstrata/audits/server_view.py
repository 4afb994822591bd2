"""Record the updates that a server sees in a run: the update of each client, or only the sum of all updates.

Audits repeat rounds with ``UpdateTap``, a local engine that passes each round's updates to an audit. The attacker is an
honest but curious server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from fedstrata.base.errors import SpecError, WithheldError
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.engines.local import LocalEngine, failure
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.federation.messages import ClientId, Fit, FitReply, Params, Reply, Request
from fedstrata.federation.secure.fit import Sums
from fedstrata.federation.secure.requests import Masked, reply_of
from fedstrata.federation.secure.ring import add
from fedstrata.methods.recipe import Recipe
from fedstrata.methods.secure import fit_form
from fedstrata.models.batchnorm import LocalGroup
from fedstrata.runs.preparation import Prepared
from fedstrata.sampling.base import AllData


@dataclass(frozen=True, eq=False)
class UpdateRound:
    """The updates that the server used in a round.

    Args:
        request: The request to all clients, which contains the global model.
        replies: A mapping from clients to the replies that the server used.
    """

    request: Fit
    replies: Mapping[ClientId, FitReply]

    def update(self, client: ClientId) -> Params:
        """Return a client's update: the client's parameters after training minus the global parameters."""
        before, after = self.request.weights.params, self.replies[client].weights.params
        return {name: after[name] - w for name, w in before.items()}


class UpdateTap(LocalEngine):
    """A local engine that passes the updates of each round to a function, even in runs with secure sums.

    Args:
        context: See ``LocalEngine``.
        store: See ``LocalEngine``.
        method: The method of the run.
        listen: A function that is called with each round's updates.
    """

    def __init__(
        self, context: ClientContext, store: StateStore, method: Recipe, listen: Callable[[UpdateRound], None]
    ) -> None:
        super().__init__(context, store)
        self._method, self._listen = method, listen
        self._asked: tuple[Fit, Mapping[ClientId, Reply | Failure]] | None = None

    @override
    def ask(
        self, requests: Mapping[ClientId, Request], *, together: bool, group: LocalGroup | None = None
    ) -> Mapping[ClientId, Reply | Failure]:
        inner = {client: each.request if isinstance(each, Masked) else each for client, each in requests.items()}
        fits = [request for request in inner.values() if isinstance(request, Fit)]
        self._asked = None
        if not fits or len(fits) < len(inner):
            return super().ask(requests, together=together, group=group)
        outcomes = self.train(dict.fromkeys(inner, fits[0]))
        self._asked = fits[0], outcomes
        return {client: self._summand(requests[client], outcome, client) for client, outcome in outcomes.items()}

    def train(self, requests: Mapping[ClientId, Fit]) -> Mapping[ClientId, Reply | Failure]:
        """Return the clients' replies to a request for updates, not yet encoded for a secure sum."""
        return super().ask(requests, together=False)

    def _summand(self, request: Request, outcome: Reply | Failure, client: ClientId) -> Reply | Failure:
        """Return a reply in the form that the request demands: for a secure sum, as a vector of integers."""
        if not isinstance(request, Masked) or isinstance(outcome, Failure):
            return outcome
        try:
            return reply_of(fit_form(self._method, self.context.config).encode(request.request, outcome, client))
        except WithheldError as error:
            return failure(error)

    @override
    def commit(self, accepted: Iterable[ClientId]) -> None:
        used = list(accepted)
        super().commit(used)
        if self._asked is not None:
            request, outcomes = self._asked
            replies = {client: each for client in used if isinstance(each := outcomes[client], FitReply)}
            self._asked = None
            if replies:
                self._listen(UpdateRound(request, replies))


def mean_update(method: Recipe, config: FederationConfig, round: UpdateRound) -> Params:
    """Return the weighted mean of a round's updates, which the server computes from the sum of the updates.

    With secure sums, the mean is computed and rounded exactly as on the server. Without secure sums, clients are
    weighted by their numbers of samples.

    Args:
        method: The method of the run.
        config: The settings that server and clients share.
        round: The updates.
    """
    replies, params = round.replies, round.request.weights.params
    if config.privacy.sums == "secure":
        form = fit_form(method, config)
        total = add(form.encode(round.request, reply, client) for client, reply in replies.items())
        sums = Sums(form.summands, len(replies), form.ring.decode(total, len(replies)))
        weight = next(name for name in form.summands if name.startswith("updates by ")).removeprefix("updates by ")
        return sums.updates(weight, params, by=sums.weight(weight))
    whole = sum(reply.size for reply in replies.values()) or 1.0
    updates = [(reply.size / whole, round.update(client)) for client, reply in replies.items()]
    return {name: sum((share * update[name] for share, update in updates), w * 0) for name, w in params.items()}


def without_masks(prepared: Prepared) -> Prepared:
    """Return the experiment without masks on the clients' updates. Masks do not affect the results."""
    privacy = prepared.spec.privacy.model_copy(update={"simulate_masks": False})
    spec = prepared.spec.model_copy(update={"privacy": privacy})
    return replace(prepared, spec=spec, config=replace(prepared.config, privacy=privacy))


def require_updates(prepared: Prepared) -> Recipe:
    """Check that an audit can attack the updates of a run's clients, and return the run's method.

    Raises:
        SpecError: A setting of the run, such as a codec, makes the audit impossible.
    """
    spec, method, task = prepared.spec, prepared.spec.method, prepared.data.task

    def refuse(key: str, problem: str, value: Any = ...) -> None:
        raise SpecError(key, problem, value)

    if not task.plain:
        refuse(
            "task", "the audit requires classification with equal class weights. Audit a run of such a task.", task.name
        )
    if not spec.communication.plain:
        refuse("communication", "the audit requires uncompressed updates. Audit a run without codecs.")
    if prepared.config.model.has_batchnorm:
        refuse("model", "has BatchNorm layers, which mix samples. Audit a run of a model without BatchNorm.")
    if not isinstance(method, Recipe) or type(method).run_round is not Recipe.run_round:
        refuse("method", "lets clients send more than updates. Audit a run of a method such as fedavg.", method.name)
    assert isinstance(method, Recipe)
    if method.aggregator.own_starts:
        problem = "lets clients start from different models. Audit a run with method.aggregator = 'size'."
        refuse("method.aggregator", problem, method.aggregator.name)
    if not isinstance(method.data_sampler, AllData):
        problem = "lets clients leave out samples. Audit a run with method.data_sampler = 'all'."
        refuse("method.data_sampler", problem, method.data_sampler.name)
    return method
