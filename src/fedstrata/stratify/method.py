"""Train with Stratify on a random sequence of labels: in batches over all clients, or sample by sample."""

from __future__ import annotations

from functools import cached_property
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
from fedstrata.federation.secure.fit import Forms
from fedstrata.methods.base import Method
from fedstrata.stratify.allowed import allowed_in_batches, allowed_in_enrolment, allowed_sample_by_sample
from fedstrata.stratify.batch import BatchMode, LRRule
from fedstrata.stratify.hybrid import HybridMode
from fedstrata.stratify.masking.enrolment import Masking, enrol
from fedstrata.stratify.masking.enrolment import check as check_masking
from fedstrata.stratify.messages import ALL, Gradient, GradientSteps
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders, Rule, frequencies, schedule
from fedstrata.stratify.secure import check_secure_batches
from fedstrata.stratify.single import SingleMode


@record("StratifyState")
class StratifyState:
    """The global model, each label's clients, and the state of the server's optimiser."""

    weights: Weights
    holders: Holders
    optimizer: Tree


class Stratify(Method):
    """Trains one epoch per round on a random schedule of labels, so that every batch contains a mixture of classes.

    The schedule is a random sequence of labels. For each label in the schedule, a client trains on one of its samples
    with this label. In mode ``batch``, a batch consists of samples of many clients. For each batch, the server takes
    one step with the mean gradient of the batch's samples, as in centralised training on these samples. In mode
    ``single``, the model travels from client to client, and each client takes one SGD step per sample.

    In mode ``hybrid``, the first rounds use batch mode, and later rounds use single-sample mode on new data. For each
    client and label, the samples' order of arrival is random. The fraction ``stream`` of the samples arrives last, in
    equal portions, one per round of single-sample mode. All other samples are available from the start. The sizes of
    portions are rounded down, and a client may use a sample twice to fill the schedule.

    A round is one epoch over the schedule. The settings ``training.clients_per_round`` and ``training.local_epochs``
    have no effect. By default, a batch contains ``training.batch_size`` samples over all clients. Client
    optimisers other than SGD cause an error.

    Args:
        mode: How the clients train the model. ``batch``: many clients compute the gradient of a batch together.
            ``single``: the model travels from client to client, with one step per sample. ``hybrid``: first ``batch``,
            then ``single`` on new samples.
        schedule: Number of samples per label in an epoch: all samples (``uncapped``), at most ``cap`` (``capped``), or
            the mean number over all labels (``uniform``).
        label_weights: Whether to multiply a sample's loss by p / q, where p and q are the shares of its label in all
            samples and in the epoch's samples. Only for ``mode = "batch"``.
        cap: Maximum number of samples per label in an epoch if ``schedule = "capped"``. Default: the median over the
            labels.
        selection: How a client is drawn to train on a label: ``uniform`` among the clients with this label, or
            ``weighted`` by their numbers of samples with this label.
        batch_size: Number of samples in a batch, over all clients. Default: ``training.batch_size``.
        lr_rule: Factor for the learning rate if ``batch_size`` is r times ``training.batch_size``: 1 (``none``), r
            (``linear``) or √r (``sqrt``).
        local_steps: In batch mode, number of steps that each client takes on its part of a batch. With 1, training on
            a batch is one step of centralised SGD.
        server: Server optimiser in batch mode, whose ``lr`` (default 1) is multiplied by ``training.lr``. Default: SGD
            with the momentum and weight decay of ``training``.
        chunk_size: In single-sample mode, number of consecutive labels in a *chunk*. The server chooses the clients of
            a chunk together. Larger chunks mean fewer transfers of the model.
        retain: In single-sample mode: of the clients that have a label, the fraction that may train on it within one
            chunk. Larger values mean fewer transfers, but favour clients with many labels.
        pretraining: Number of initial rounds that use batch mode if ``mode = "hybrid"``. Default: half the rounds.
        stream: Fraction of each client's samples that arrive only after the initial rounds (``pretraining``) if ``mode
            = "hybrid"``.
        masking: How labels are hidden from the server: not at all (``none``), as keyed hashes (``prf``) or by
            encryption (``ckks``).
    """

    paper = "Wong, Lim and Chan, Stratify: Rethinking Federated Learning for Non-IID Data through Balanced Sampling"
    needs_replies = ""
    needs_sgd = (
        "Stratify's clients take plain SGD steps, each on one batch; in batch mode, method.server offers other "
        "optimisers"
    )

    needs_strata = True

    mode: Literal["batch", "single", "hybrid"] = "batch"
    schedule: Rule = "capped"
    label_weights: bool = False
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
        """Check that masking is possible, and that the settings fit the model and the mode."""
        check_masking(self.masking, config.strata)
        check_secure_batches(config, self.mode)
        if config.training.batch_norm == "local" and config.model.has_batchnorm:
            problem = "Stratify computes BatchNorm statistics over batches of all clients. Use batch_norm = 'average'."
            raise SpecError("training.batch_norm", problem, "local")
        if self.mode == "single":
            problem = (
                "has no effect, because method.mode = 'single' does not use batches. Remove the key, or use "
                "method.mode = 'batch' or 'hybrid'."
            )
            for name, default in (("lr_rule", "none"), ("local_steps", 1)):
                if getattr(self, name) != default:
                    raise SpecError(f"method.{name}", problem, getattr(self, name))
            if self.server is not None:
                raise SpecError("method.server", problem)
        if self.lr_rule != "none" and self.batch_size is None:
            problem = "has no effect, because method.batch_size is not set. Set method.batch_size, or remove lr_rule."
            raise SpecError("method.lr_rule", problem, self.lr_rule)
        self._check_label_weights(config)
        self._mode.check(config)

    def _check_label_weights(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if label weights would have no effect, give a wrong gradient, or reveal hidden values."""
        problems = {
            "requires batches. Use method.mode = 'batch'.": self.mode != "batch",
            "gives the gradient of the mean loss only with one local step. Use method.local_steps = 1.": (
                self.local_steps > 1
            ),
            "tells clients how frequent each label is, but masking must hide these frequencies. Use "
            "method.masking = 'none'.": self.masking != "none",
            "lets the server choose small weights, so that only few samples contribute to a sum. Use "
            "privacy.min_samples = 1.": config.privacy.min_samples > 1,
            "lets the server choose small weights, so that only few clients contribute to a secure sum. Use "
            "privacy.sums = 'plain'.": config.privacy.sums == "secure",
            "requires a task in which all samples have the same weight. Use another task.": config.task.weighted,
        }
        for problem, applies in problems.items():
            if self.label_weights and applies:
                raise SpecError("method.label_weights", problem, True)

    @override
    def to_spec(self) -> dict[str, Any]:
        # Omit the default, because specs of earlier versions do not have this key. The finished runs of earlier
        # versions are found only by an equal spec.
        return {key: value for key, value in super().to_spec().items() if key != "label_weights" or value}

    @override
    def forms(self, config: FederationConfig) -> Forms:
        form = self._batches.form(config)
        return {Gradient: form, GradientSteps: form}

    @override
    def asks_for_changes(self) -> bool:
        return self.mode == "batch"

    @property
    @override
    def conceals(self) -> frozenset[Fact]:
        return frozenset({"labels"} if self.masking != "none" else ())

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the requests that the server may send: requests about labels at the start, and training requests."""
        training, weighted, hybrid = agreed.training, self.selection == "weighted", self.mode == "hybrid"
        requests = allowed_in_enrolment(self.masking, weighted=weighted, classes=agreed.strata)
        before, window = 0, by_round("all", lambda _: ALL)
        if isinstance(self._mode, HybridMode):
            before, phase = self._mode.batch_rounds(agreed), self._mode.phase
            window = by_round("what has arrived", lambda round: phase(agreed, round)[1])
        if self.mode != "single":
            size = self.batch_size or training.batch_size
            lr = by_round("the round's", lambda round: self._batches.rate(training, round))
            rounds = range(1, before + 1) if hybrid else None
            requests += allowed_in_batches(size, window, lr, self.local_steps, rounds, self._weighted)
        if self.mode != "batch":
            rounds = range(before + 1, training.rounds + 1) if hybrid else None
            requests += allowed_sample_by_sample(window, self.chunk_size, rounds)
        return requests

    @cached_property
    def _batches(self) -> BatchMode:
        return BatchMode(self.batch_size, self.lr_rule, self.local_steps, self.server, self._weighted)

    @property
    def _weighted(self) -> bool:
        """Whether clients multiply losses by weights. With the schedule ``uncapped``, all weights would be 1."""
        return self.label_weights and self.schedule != "uncapped"

    @cached_property
    def _mode(self) -> BatchMode | SingleMode | HybridMode:
        """The object that implements the chosen ``mode`` and trains the rounds."""
        singles = SingleMode(self.chunk_size, self.retain)
        if self.mode == "hybrid":
            return HybridMode(self._batches, singles, self.pretraining, self.stream)
        return self._batches if self.mode == "batch" else singles

    def init(self, federation: Federation, weights: Weights) -> StratifyState:
        """Find out which labels each client has. With masking, the server sees numbers instead of labels."""
        roll = enrol(federation, self.masking, weighted=self.selection == "weighted")
        return StratifyState(weights, roll.holders(), None)

    def run_round(self, federation: Federation, state: StratifyState) -> tuple[StratifyState, dict[str, Any]]:
        """Train one epoch of the schedule."""
        config, holders = federation.config, state.holders
        mode, window = self._mode, ALL
        if isinstance(mode, HybridMode):
            mode, window = mode.phase(config, federation.round)
        totals = holders.totals
        if window != ALL:
            totals = (totals * (window[1] - window[0])).round().astype(totals.dtype)
        wanted = schedule(frequencies(totals, self.schedule, self.cap), federation.rng("schedule"))
        roster = Roster(federation, holders, weighted=self.selection == "weighted", window=window)
        weights, optimizer, metrics = mode.run_epoch(roster, wanted, state.weights, state.optimizer)
        metrics |= communication(weights, metrics["transfers"], config.clients, federation.round)
        return StratifyState(weights, holders, optimizer), metrics | {"scheduled": len(wanted)}
