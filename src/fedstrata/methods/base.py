"""The base class of methods, and the registry of all methods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.federation.allowed import Agreed, Allowed, declares
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fact, Weights
from fedstrata.federation.secure.fit import Forms
from fedstrata.objectives.base import CrossEntropy, Objective

ASKING = {
    "method": ("run_round", "train_clients", "init", "handlers"),
    "client_sampler": ("select", "init", "handlers"),
    "data_sampler": ("keep", "init", "handlers"),
    "objective": ("client_final", "handlers"),
}
"""For each base class, the Python methods and attributes that determine the requests to clients and the replies.

A subclass that overrides one of these attributes must also override the declaration of its requests: ``sends`` in an
objective, and ``allowed`` in all other classes.
"""


READING = {
    "method": ("run_round", "train_clients", "init"),
    "client_sampler": ("select", "init", "observe"),
    "data_sampler": ("keep", "init"),
    "objective": ("server_update", "metrics", "expected"),
    "aggregator": ("coefficients", "weigh", "combine"),
}
"""For each base class, the Python methods that read clients' replies.

A subclass that overrides one of these methods must also declare ``needs_replies``.
"""


class Method(Setting):
    """A federated method: Python code that runs on the server and sends typed requests to clients.

    The fields of a subclass are the method's settings. The method ``init`` returns the first state, and ``run_round``
    computes the next state from the current state. A state is a record with at least the field ``weights``, which is
    the global model.
    """

    paper: ClassVar[str] = ""
    """The paper that defines the method."""

    needs_sgd: ClassVar[str] = ""
    """A sentence, without a full stop, that says why the method supports only plain SGD on single batches.

    The reason is empty if the method supports all optimisers of the spec's section ``training``. See also
    ``Objective.needs_sgd``.
    """

    needs_replies: ClassVar[str] = ""
    """A verb phrase that says why the server needs individual replies; see ``Aggregator.needs_replies``.
    """

    def most_summed(self, config: FederationConfig) -> int:
        """Return the maximum number of clients that contribute to one secure sum (``privacy.sums``)."""
        return config.clients

    def forms(self, config: FederationConfig) -> Forms:
        """Return the rules with which secure sums (``privacy.sums``) add up the clients' replies."""
        return {}

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that handle the method's own requests on a client; see ``fedstrata.clients.handling``."""

    def all_handlers(self) -> tuple[Callable[..., Any], ...]:
        """Return the handlers of the method's requests. A recipe adds the handlers of its four components' requests."""
        return self.handlers

    needs_strata: ClassVar[bool] = False
    """Whether each sample must belong to a stratum, such as its class or a range of targets."""

    def objective_in_use(self) -> Objective:
        """Return the objective that clients minimise in local training."""
        return CrossEntropy()

    def personal_objective(self) -> Objective:
        """Return the objective for fine-tuning the global model on a client's own data (``evaluation.fine_tune``)."""
        return CrossEntropy()

    def asks_for_changes(self) -> bool:
        """Return True if all clients reply with updates of the received model. Codecs can compress such updates."""
        return False

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests that the method may send, and their bounds. Sites refuse all other requests.

        The result None means that the method does not declare its requests, and works only in simulations. A subclass
        must override ``allowed`` if it overrides one of the methods in ``ASKING``.
        """
        return None

    def declared(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the declared requests, or None if a subclass overrides a method in ``ASKING`` but not ``allowed``."""
        return self.allowed(agreed) if declares(type(self), "allowed", *ASKING["method"]) else None

    @property
    def conceals(self) -> frozenset[Fact]:
        """The facts that the method hides about clients, and that evaluations must not disclose."""
        return frozenset()

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the settings are not compatible with the federation."""

    @abstractmethod
    def init(self, federation: Federation, weights: Weights) -> Any:
        """Return the state before the first round. The requests of ``init`` belong to round 0."""

    @abstractmethod
    def run_round(self, federation: Federation, state: Any) -> tuple[Any, dict[str, Any]]:
        """Run one round, and return the new state and the round's metrics."""

    def evaluated(self, config: FederationConfig, state: Any) -> Weights:
        """Return the model to evaluate, and to save at the end of a run. Default: ``state.weights``."""
        weights: Weights = state.weights
        return weights


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
        "fedavgm": "fedstrata.methods.fedopt:FedAvgM",
        "fedadagrad": "fedstrata.methods.fedopt:FedAdagrad",
        "fedadam": "fedstrata.methods.fedopt:FedAdam",
        "fedyogi": "fedstrata.methods.fedopt:FedYogi",
        "fednova": "fedstrata.methods.fednova:FedNova",
        "fedexp": "fedstrata.methods.fedexp:FedExP",
        "ccvr": "fedstrata.methods.ccvr:CCVR",
        "fedau": "fedstrata.methods.fedau:FedAU",
        "mifa": "fedstrata.methods.mifa:MIFA",
        "fedawe": "fedstrata.methods.fedawe:FedAWE",
        "fedvarp": "fedstrata.methods.fedvarp:FedVARP",
    },
)

AnyMethod = Annotated[Method, FromRegistry(METHODS, default="fedavg")]
