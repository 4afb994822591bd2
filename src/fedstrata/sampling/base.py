"""Define the base classes of client samplers and data samplers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from typing_extensions import override

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.federation.secure.fit import Forms


@dataclass(frozen=True)
class Selection:
    """The clients of a round, and how they were drawn. Aggregators compute client weights from this information.

    A sampler may divide clients into groups, called *strata*, and draw from each stratum separately.

    Args:
        clients: The m distinct clients, ascending, shape (m,).
        draws: The number of times that each client was drawn, shape (m,); 1 for each client if draws are without
            replacement.
        probability: The probability that a single draw from the client's stratum picks the client, shape (m,).
        stratum: The stratum of each client, shape (m,).
        stratum_sizes: The number of clients in each of the H strata, shape (H,).
        stratum_samples: The total number of samples in each stratum, shape (H,), if clients were drawn in proportion to
            their numbers of samples; otherwise None. With such an array, a mean weighted by sample counts gives the
            same weight to all draws from a stratum.
        stratum_chance: For each stratum, the probability that the stratum gets at least one draw, shape (H,); None if
            the number of draws from each stratum is not random.
        metrics: The metrics that the sampler records for the round.
        round: The round, counted from 1. The method sets this value for the aggregator.
        rounds: The number of rounds of the run. The method sets this value for the aggregator.
    """

    clients: Ints
    draws: Ints
    probability: Floats
    stratum: Ints
    stratum_sizes: Ints
    stratum_samples: Ints | None = None
    stratum_chance: Floats | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    round: int = 1
    rounds: int = 1

    @classmethod
    def plain(cls, clients: Ints, population: int) -> Selection:
        """Return a selection of clients that were drawn uniformly and without replacement from a single stratum.

        Args:
            clients: The m clients that were drawn, in any order, shape (m,).
            population: The number of clients that could be drawn.
        """
        clients = np.sort(clients)
        m = len(clients)
        return cls(
            clients=clients,
            draws=np.ones(m, dtype=np.int64),
            probability=np.full(m, 1 / max(population, 1)),
            stratum=np.zeros(m, dtype=np.int64),
            stratum_sizes=np.array([population]),
        )

    @classmethod
    def from_draws(cls, clients: Ints, draws: Ints, sizes: Ints, *, by_size: bool = True) -> Selection:
        """Return a selection of clients that were drawn from a single stratum in proportion to ``sizes``.

        Args:
            clients: All clients that could be drawn, ascending, shape (N,).
            draws: The number of times that each client was drawn, shape (N,).
            sizes: The weight of each client, shape (N,). A client's expected number of draws is proportional to its
                weight. At least one weight must be positive.
            by_size: True if ``sizes`` are numbers of samples, false if they are other weights.
        """
        drawn = draws > 0
        return cls(
            clients=clients[drawn],
            draws=draws[drawn],
            probability=(sizes / sizes.sum())[drawn],
            stratum=np.zeros(int(drawn.sum()), dtype=np.int64),
            stratum_sizes=np.array([len(clients)]),
            stratum_samples=np.array([sizes.sum()]) if by_size else None,
        )


@dataclass(frozen=True)
class Strata:
    """The strata (groups of clients) of a sampler, and the features from which the sampler computed them.

    Args:
        clients: Clients with known features, ascending, shape (n,).
        points: The features of each client, shape (n, d).
        strata: The stratum of each client, in 0 … H − 1, shape (n,).
    """

    clients: Ints
    points: Floats32
    strata: Ints


class ClientSampler(Setting):
    """Base class of the samplers that draw the clients of a round.

    A sampler object does not change during a run. The methods of a sampler take the sampler's state as an argument, and
    return the new state.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that handle the sampler's own requests on a client; see ``fedstrata.clients.handling``."""

    tells_sizes: ClassVar[bool] = False
    """Whether the sampler asks clients for their exact numbers of samples."""

    needs_replies: ClassVar[str] = ""
    """The reason why the server needs individual replies (for example, "compares updates"); see ``Aggregator``."""

    def most_invited(self, config: FederationConfig) -> int:
        """Return the maximum number of clients that the sampler invites per round."""
        return config.training.invited(config.clients)

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the settings are not compatible with the federation."""
        m = config.training.invited(config.clients)
        if m > config.clients:
            raise SpecError(
                "training.clients_per_round",
                f"the partition has {config.clients} clients. Use at most {config.clients}.",
                m,
            )

    def check_private(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the sampler would learn numbers of samples that clients keep private."""
        if self.tells_sizes:
            raise SpecError(
                "method.client_sampler",
                "needs the clients' numbers of samples, which method.data_sampler keeps private. Use "
                "another client sampler.",
            )

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests that the sampler sends. In a deployment, sites refuse all other requests.

        If the result is None, the sampler does not declare its requests, and sites refuse the method.
        """
        return None

    def cohort(self, config: FederationConfig) -> int:
        """Return the expected number of clients per round, which is at least one."""
        return config.training.invited(config.clients)

    def learns(self, config: FederationConfig) -> bool:
        """Return True if ``observe`` reads the models in the participants' replies."""
        return False

    def init(self, federation: Federation) -> Tree:
        """Return the state before the first round."""
        return None

    @abstractmethod
    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Choose the clients of the current round.

        Args:
            federation: The federation, which lists the clients that may be invited, and sends the sampler's requests.
            state: The sampler's state.
            weights: The global model.
        """

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Return the sampler's state, updated with the replies of a round.

        Args:
            state: The sampler's state.
            replies: A mapping from each participant to its reply.
        """
        return state

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """Return the sampler's strata after a round, for plots; None if the sampler has no strata.

        Args:
            config: The federation's settings.
            state: The sampler's state after the round.
            round: The round, counted from 1.
        """
        return None


def with_replacement(
    clients: Ints, sizes: Ints, m: int, generator: np.random.Generator, *, by_size: bool = True
) -> Selection:
    """Draw m clients independently with probabilities proportional to ``sizes``. See ``Selection.from_draws``."""
    draws = generator.multinomial(m, sizes / sizes.sum())
    return Selection.from_draws(clients, draws, sizes, by_size=by_size)


class Uniform(ClientSampler):
    """Draws clients at random with equal probability.

    Args:
        replacement: Whether a client may be drawn more than once per round.
    """

    needs_replies = ""

    replacement: bool = False

    @override
    def check(self, config: FederationConfig) -> None:
        super().check(config)
        if self.replacement and config.privacy.sums == "secure":
            problem = "can draw a client twice, but a secure sum counts each client once. Set replacement = false, or "
            problem += "privacy.sums = 'plain'."
            raise SpecError("method.client_sampler.replacement", problem, True)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return an empty list, because the sampler does not send requests."""
        return []

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw clients uniformly from the clients that may be invited."""
        candidates = federation.candidates()
        m, generator = federation.config.training.invited(federation.config.clients), federation.rng("client-sampling")
        if self.replacement and len(candidates):
            return with_replacement(candidates, np.ones_like(candidates), m, generator, by_size=False), state
        chosen = generator.choice(candidates, size=min(m, len(candidates)), replace=False)
        return Selection.plain(chosen.astype(np.int64), len(candidates)), state


KeepResult = tuple[float, Tree, Mapping[str, Any]]
"""The result of ``DataSampler.keep``: the probability of using a sample, the sampler's new state, and metrics."""


class DataSampler(Setting):
    """Base class of the samplers that choose the fraction of samples that each client uses in a round."""

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that handle the sampler's own requests on a client; see ``fedstrata.clients.handling``."""

    needs_replies: ClassVar[str] = ""
    """The reason why the server needs individual replies (for example, "compares updates"); see ``Aggregator``."""

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the settings are not compatible with the federation."""

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests that the sampler sends, or None; see ``ClientSampler.allowed``."""
        return None

    def init(self, federation: Federation) -> Tree:
        """Return the state before the first round."""
        return None

    def forms(self, config: FederationConfig) -> Forms:
        """Return the rules by which secure sums (``privacy.sums``) add up the replies to the sampler's requests."""
        return {}

    @property
    def fixed_share(self) -> float | None:
        """The fraction of samples that each participant uses in all rounds; None if the fraction varies."""
        return None

    @property
    def private(self) -> bool:
        """Whether clients hide how many samples they have and how many samples they use in training."""
        return False

    @abstractmethod
    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Compute the probability with which participants use each of their samples in this round.

        Args:
            federation: The federation, which sends the sampler's requests.
            state: The sampler's state.
            clients: The participants.

        Returns:
            The probability, the sampler's new state, and the sampler's metrics. The probability is the same for all
            samples of all participants.
        """


class AllData(DataSampler):
    """Each client uses all its samples."""

    needs_replies = ""

    @property
    @override
    def fixed_share(self) -> float:
        return 1.0

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return an empty list, because the sampler does not send requests."""
        return []

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Return the probability 1, because all samples are used."""
        return 1.0, state, {}


CLIENT_SAMPLERS: Registry[ClientSampler] = Registry(
    "client sampler",
    ClientSampler,  # type: ignore[type-abstract]
    {
        "uniform": "fedstrata.sampling.base:Uniform",
        "poisson": "fedstrata.sampling.poisson:Poisson",
        "weighted": "fedstrata.sampling.weighted:Weighted",
        "all": "fedstrata.sampling.fedsampling:Everyone",
        "fedsts": "fedstrata.sampling.stratified:Stratified",
        "fedssar": "fedstrata.sampling.fedssar:FedSSARSampler",
        "clustered": "fedstrata.sampling.clustered:Clustered",
        "power-of-choice": "fedstrata.sampling.power_of_choice:PowerOfChoice",
        "fedentopt": "fedstrata.sampling.entropy:Entropy",
        "fedgs": "fedstrata.sampling.graph:Graph",
    },
)

DATA_SAMPLERS: Registry[DataSampler] = Registry(
    "data sampler",
    DataSampler,  # type: ignore[type-abstract]
    {
        "all": "fedstrata.sampling.base:AllData",
        "fedstas": "fedstrata.sampling.client_sizes:FedSTaSData",
        "fedsampling": "fedstrata.sampling.fedsampling:FedSamplingData",
    },
)

AnyClientSampler = Annotated[ClientSampler, FromRegistry(CLIENT_SAMPLERS)]
AnyDataSampler = Annotated[DataSampler, FromRegistry(DATA_SAMPLERS)]
