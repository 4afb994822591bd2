"""Stratify: training follows a random sequence of labels, in batches over all clients or sample by sample."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.aggregation.optimizers import AnyServer
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed, by_round
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.exchanges import communication
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fact, Weights
from fedstrata.methods.base import Method
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.stratify.allowed import allowed_in_batches, allowed_in_enrolment, allowed_sample_by_sample
from fedstrata.stratify.batch import BatchMode, LRRule, rate
from fedstrata.stratify.hybrid import HybridMode
from fedstrata.stratify.masking.enrolment import Masking, enrol
from fedstrata.stratify.masking.enrolment import check as check_masking
from fedstrata.stratify.messages import ALL
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders, Rule, frequencies, schedule
from fedstrata.stratify.single import SingleMode


@record("StratifyState")
class StratifyState:
    """The global model, the clients that hold each label, and the state of the server's optimiser."""

    weights: Weights
    holders: Holders
    optimizer: Tree


class Stratify(Method):
    """Trains one epoch per round on a schedule of labels that gives each class its share of every batch.

    The schedule is a random sequence of labels. At each of its positions, a client that holds the label trains on one
    sample of this label. In mode ``batch``, a batch consists of samples of many clients. Each batch is one step on the
    mean gradient over its samples: the same step as in a centralised run on these samples. In mode ``single``, the
    model travels from client to client, and each client takes one SGD step per sample.

    Mode ``hybrid`` begins with rounds of batches, and continues with rounds of single samples on new data. The samples
    of each client and label are put in a random order of arrival. The last part of them, ``stream``, arrives in equal
    shares, one before each round of single samples, and that round trains the share. All other samples are available
    from the start. (Shares are rounded down at each client, and a sample may be used twice to fill the schedule.)

    A round is an epoch over the schedule: ``training.clients_per_round`` and ``training.local_epochs`` have no effect,
    and ``training.batch_size`` is the size of a batch over all clients. Clients' optimisers other than SGD are refused.

    Args:
        mode: How clients train. ``batch``: the clients that hold the samples of a batch compute its gradient together.
            ``single``: the model goes from client to client, with one step per sample. ``hybrid``: the first rounds use
            batch mode; the later ones use single-sample mode, with data that were not available before.
        schedule: Number of samples of each label in an epoch. ``uncapped``: all samples. ``capped``: all samples, but
            at most ``cap``. ``uniform``: for every label, the mean number of samples per label.
        cap: Largest number of samples of a label in an epoch with ``schedule = "capped"``. Default: the median, over
            the labels, of the number of samples.
        selection: How a client is drawn among those that hold a label. ``uniform``: all have the same probability.
            ``weighted``: the probability is proportional to the client's number of samples of the label.
        batch_size: Number of samples in a batch, over all clients. Larger batches need fewer exchanges, but also give
            fewer steps. Default: ``training.batch_size``.
        lr_rule: Factor of the learning rate, if ``batch_size`` is r times ``training.batch_size``. ``none``: 1.
            ``linear``: r. ``sqrt``: √r.
        local_steps: Only in batch mode: number of steps that a client takes on its part of a batch. With 1, a batch
            equals one step of centralised SGD. With more steps, the clients' models drift apart.
        server: Only in batch mode: optimiser of the server. Its ``lr`` (default 1) is multiplied by ``training.lr``.
            Default: SGD with the momentum and the weight decay of ``training``.
        chunk_size: Only in single-sample mode: number of labels in a *chunk*, a part of the schedule. The server cuts
            the schedule into chunks. In each chunk, the server chooses the client that can train on most of the labels,
            so that the model is transferred less often.
        retain: Only in single-sample mode: share of the holders of a label that may train on this label in a chunk. The
            server draws them at random for each chunk. A larger share needs fewer transfers, but favours clients with
            many labels.
        pretraining: Only in hybrid mode: number of rounds in batch mode, which come first. Default: half of all rounds.
        stream: Only in hybrid mode: share of each client's samples that becomes available only in the rounds in
            single-sample mode.
        masking: Form in which the server sees labels. ``none``: unchanged. ``prf``: as keyed hashes. ``ckks``:
            encrypted. With the same keys, all three modes train the same model.
    """

    paper = "Wong, Lim and Chan, Stratify: Rethinking Federated Learning for Non-IID Data through Balanced Sampling"
    needs_sgd = "Stratify takes steps of SGD, each on one batch; in batch mode, method.server has other optimisers"

    needs_strata = True

    mode: Literal["batch", "single", "hybrid"] = "batch"
    schedule: Rule = "capped"
    cap: PositiveInt | None = None
    selection: Literal["uniform", "weighted"] = "uniform"
    batch_size: PositiveInt | None = None
    lr_rule: LRRule = "none"
    local_steps: PositiveInt = 1
    server: AnyServer | None = None
    chunk_size: int = Field(default=5, ge=1, le=100_000)
    retain: float = Field(default=0.5, gt=0, le=1)
    pretraining: PositiveInt | None = None
    stream: float = Field(default=0.5, gt=0, lt=1)
    masking: Masking = "none"

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if masking lacks its extra, or if a setting does not fit the model or the mode."""
        check_masking(self.masking, config.strata)
        if config.training.batch_norm == "local" and has_batchnorm(config.model.module):
            problem = "Stratify computes BatchNorm's statistics over batches of all clients. Use 'average'."
            raise SpecError("training.batch_norm", problem, "local")
        if self.mode == "single":
            problem = (
                "has no effect, because this mode does not use batches. Remove it, or use method.mode = "
                "'batch' or 'hybrid'."
            )
            for name, default in (("lr_rule", "none"), ("local_steps", 1)):
                if getattr(self, name) != default:
                    raise SpecError(f"method.{name}", problem, getattr(self, name))
            if self.server is not None:
                raise SpecError("method.server", problem)
        if self.lr_rule != "none" and self.batch_size is None:
            problem = "has no effect, because method.batch_size is not set. Set method.batch_size, or remove lr_rule."
            raise SpecError("method.lr_rule", problem, self.lr_rule)
        self._mode.check(config)

    @override
    def asks_for_changes(self) -> bool:
        return self.mode == "batch"

    @property
    @override
    def conceals(self) -> frozenset[Fact]:
        return frozenset({"labels"} if self.masking != "none" else ())

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the requests before the first round, and those of training: in batches, sample by sample, or both."""
        training, weighted, hybrid = agreed.training, self.selection == "weighted", self.mode == "hybrid"
        requests = allowed_in_enrolment(self.masking, weighted=weighted, classes=agreed.strata)
        mode = self._mode
        window = by_round("what has arrived" if hybrid else "all", lambda round: mode.phase(agreed, round)[1])
        before = mode.batch_rounds(agreed) if isinstance(mode, HybridMode) else 0
        if self.mode != "single":
            scale, size = self._batches.scale(training), self.batch_size or training.batch_size
            lr = by_round("the round's", lambda round: rate(training, self.server, scale, round))
            rounds = range(1, before + 1) if hybrid else None
            requests += allowed_in_batches(size, window, lr, self.local_steps, rounds)
        if self.mode != "batch":
            rounds = range(before + 1, training.rounds + 1) if hybrid else None
            requests += allowed_sample_by_sample(window, self.chunk_size, rounds)
        return requests

    @property
    def _batches(self) -> BatchMode:
        return BatchMode(self.batch_size, self.lr_rule, self.local_steps, self.server)

    @property
    def _mode(self) -> BatchMode | SingleMode | HybridMode:
        """The object that implements the chosen ``mode``, and trains the rounds."""
        singles = SingleMode(self.chunk_size, self.retain)
        if self.mode == "hybrid":
            return HybridMode(self._batches, singles, self.pretraining, self.stream)
        return self._batches if self.mode == "batch" else singles

    def init(self, federation: Federation, weights: Weights) -> StratifyState:
        """Learn which clients hold which label. With masking, the server sees only a number in place of each label."""
        roll = enrol(federation, self.masking, weighted=self.selection == "weighted")
        return StratifyState(weights, roll.holders(), None)

    def run_round(self, federation: Federation, state: StratifyState) -> tuple[StratifyState, dict[str, Any]]:
        """Train one epoch of the schedule."""
        config, holders = federation.config, state.holders
        mode, window = self._mode.phase(config, federation.round)
        totals = holders.totals()
        if window != ALL:
            totals = (totals * (window[1] - window[0])).round().astype(totals.dtype)
        wanted = schedule(frequencies(totals, self.schedule, self.cap), federation.rng("schedule"))
        roster = Roster(federation, holders, weighted=self.selection == "weighted", window=window)
        weights, optimizer, metrics = mode.run_epoch(roster, wanted, state.weights, state.optimizer)
        metrics |= communication(weights, metrics["transfers"], config.clients, federation.round)
        return StratifyState(weights, holders, optimizer), metrics | {"scheduled": len(wanted)}
