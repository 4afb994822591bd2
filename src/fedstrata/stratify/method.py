"""Stratify: the label schedule decides what trains next, in union batches or sample by sample."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from fedstrata.aggregation.optimizers import AnyServer
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed, by_round
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fact, Weights
from fedstrata.federation.round_log import communication
from fedstrata.methods.base import Method
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.stratify.allowed import allowed_in_batches, allowed_in_enrolment, allowed_sample_by_sample
from fedstrata.stratify.batch import BatchPlan, batch_epoch, rate
from fedstrata.stratify.masking.enrolment import Masking, enrol
from fedstrata.stratify.masking.enrolment import check as check_masking
from fedstrata.stratify.schedule import Holders, Rule, frequencies, schedule
from fedstrata.stratify.single import Route, single_epoch

MOST_CELLS = 2**31
"""Positions × clients of a chunk that is planned at once, five bytes each."""


@record("StratifyState")
class StratifyState:
    """The global model, who holds which label, and the server optimiser's state."""

    weights: Weights
    holders: Holders
    optimizer: Tree


class Stratify(Method):
    """One epoch of the stratified label schedule a round.

    ``batch``: union batches over the clients that hold the labels. Each is one step on the gradient of the summed loss,
    divided by the number of samples that were really trained: the same step that a centralised run would make on those
    samples. ``single``: the model travels from client to client, and each takes one SGD step per sample of its task.
    ``hybrid``: batches for the first rounds, on the data that are there; then one sample after another of a stream of
    new ones. Each client's samples of a label arrive in an order of their own. All but the last ``stream`` of them are
    there from the start; the rest arrive in equal parts before each of the later rounds, and every part is trained in
    the round before which it arrived. (Parts are rounded down at each client; a sample may train twice to fill the
    schedule.) A round is an epoch over the schedule: ``training.clients_per_round`` and ``training.local_epochs`` mean
    nothing here, and training's batch size is that of a union batch.

    Args:
        mode: ``batch``, ``single`` or ``hybrid``.
        schedule: How often each label trains in an epoch: ``capped`` at the median count, ``uniform`` (the mean count
            for every label) or ``uncapped`` (its own count).
        cap: The cap instead of the median.
        selection: Among a label's holders, ``uniform`` or ``weighted`` by how many samples each has.
        batch_size: Samples in a batch over all clients; training's unless given. Larger batches are fewer exchanges:
            the gradients of several batches at one model are the gradient of one batch of all their samples.
        lr_rule: What becomes of the learning rate where ``batch_size`` is not training's: it stays (``none``), or is
            multiplied by their ratio (``linear``) or its root (``sqrt``).
        local_steps: Batch mode: steps that a client takes on its own part of a batch before its answer. With 1 a batch
            is a centralised step; with more, clients drift apart between two exchanges.
        server: The server's optimiser in batch mode; SGD with training's momentum and weight decay unless given. Its
            ``lr``, 1 unless given, multiplies training's.
        chunk_size: Single-sample mode: consecutive positions that are given out together, in the longest runs that one
            client can train.
        retain: Single-sample mode: the part of a label's holders that is considered in each chunk. With 1 the runs are
            longest, and larger holders take more of them.
        pretraining: Hybrid mode: rounds of batches; half of all rounds unless given.
        stream: Hybrid mode: the part of every client's samples that arrives later.
        masking: How the server learns who shares a label: ``none`` (labels in the clear), ``prf`` (a keyed hash)
            or ``ckks`` (compared under encryption). All train alike under the same keys.
    """

    paper = "Stratify: label-aware sampling for federated learning on non-IID data, Algorithms 1 to 4"

    mode: Literal["batch", "single", "hybrid"] = "batch"
    schedule: Rule = "capped"
    cap: PositiveInt | None = None
    selection: Literal["uniform", "weighted"] = "uniform"
    batch_size: PositiveInt | None = None
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    local_steps: PositiveInt = 1
    server: AnyServer | None = None
    chunk_size: int = Field(default=5, ge=1, le=100_000)
    retain: float = Field(default=0.5, gt=0, le=1)
    pretraining: PositiveInt | None = None
    stream: float = Field(default=0.5, gt=0, lt=1)
    masking: Masking = "none"

    def check(self, config: FederationConfig) -> None:
        """Masking needs its extra; batches of one need a model and an optimiser without memory of earlier samples."""
        check_masking(self.masking, config.classes)
        normalises = has_batchnorm(config.model.module)
        if normalises and config.training.batch_norm == "local":
            problem = "Stratify's statistics are those of the federation's batches; use average"
            raise SpecError("training.batch_norm", problem, "local")
        for name, usual in (("lr_rule", "none"), ("local_steps", 1)):
            if self.mode == "single" and getattr(self, name) != usual:
                raise SpecError(f"method.{name}", "is about batches; only for batch and hybrid", getattr(self, name))
        if self.lr_rule != "none" and self.batch_size is None:
            problem = "is about a batch_size that is not training's; give method.batch_size"
            raise SpecError("method.lr_rule", problem, self.lr_rule)
        if self.mode == "batch":
            key = "training.batch_size" if self.batch_size is None else "method.batch_size"
            if normalises and (self.batch_size or config.training.batch_size) == 1:
                raise SpecError(key, "BatchNorm needs at least two samples in a batch", 1)
            return
        if config.privacy.min_samples > 1:
            problem = f"method.mode = {self.mode!r} passes a model on after single samples; use 1, or 'batch'"
            raise SpecError("privacy.min_samples", problem, config.privacy.min_samples)
        if self.chunk_size * config.clients > MOST_CELLS:
            problem = f"a chunk is a table of positions and clients; at most {MOST_CELLS // config.clients} with these"
            raise SpecError("method.chunk_size", problem, self.chunk_size)
        if normalises:
            raise SpecError("method.mode", "BatchNorm has nothing to normalise in batches of one; use batch", self.mode)
        if self.mode == "single" and self.server is not None:
            raise SpecError("method.server", "the model travels and no server takes steps; only for batch and hybrid")
        if config.training.momentum > 0:
            problem = "would have to travel with the model in single-sample mode; use 0"
            raise SpecError("training.momentum", problem, config.training.momentum)
        if self.mode == "hybrid" and self._pretraining(config) >= config.training.rounds:
            problem = f"leaves no round for the stream; at most {config.training.rounds - 1} with these training.rounds"
            raise SpecError("method.pretraining", problem, self._pretraining(config))

    def asks_for_changes(self) -> bool:
        """Gradients, in batches; a travelling model is none."""
        return self.mode == "batch"

    @property
    def conceals(self) -> frozenset[Fact]:
        """Labels, where they are masked."""
        return frozenset({"labels"} if self.masking != "none" else ())

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the requests of enrolment, then those of batches or of training sample by sample, or both."""
        training, weighted, hybrid = agreed.training, self.selection == "weighted", self.mode == "hybrid"
        requests = allowed_in_enrolment(self.masking, weighted=weighted, classes=agreed.classes)
        window = by_round("what has arrived" if hybrid else "all", lambda round: self._phase(agreed, round)[1])
        before = self._pretraining(agreed)
        if self.mode != "single":
            scale, size = self._scale(agreed), self.batch_size or training.batch_size
            lr = by_round("the round's", lambda round: rate(training, self.server, scale, round))
            rounds = range(1, before + 1) if hybrid else None
            requests += allowed_in_batches(size, window, lr, self.local_steps, rounds)
        if self.mode != "batch":
            rounds = range(before + 1, training.rounds + 1) if hybrid else None
            requests += allowed_sample_by_sample(window, self.chunk_size, rounds)
        return requests

    def _scale(self, agreed: Agreed) -> float:
        """What the batch size does to the learning rate."""
        size = self.batch_size or agreed.training.batch_size
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_rule]
        return float((size / agreed.training.batch_size) ** power)

    def _pretraining(self, config: Agreed) -> int:
        return self.pretraining or max(1, config.training.rounds // 2)

    def init(self, federation: Federation, weights: Weights) -> StratifyState:
        """Learn who holds which label, under placeholders."""
        roll = enrol(federation, self.masking, weighted=self.selection == "weighted")
        return StratifyState(weights, roll.holders(), None)

    def run_round(self, federation: Federation, state: StratifyState) -> tuple[StratifyState, dict[str, Any]]:
        """One epoch of the schedule."""
        config, holders = federation.config, state.holders
        single, window = self._phase(config, federation.round)
        totals = holders.totals()
        if window != (0.0, 1.0):
            totals = (totals * (window[1] - window[0])).round().astype(totals.dtype)
        wanted = schedule(frequencies(totals, self.schedule, self.cap), federation.rng("schedule"))
        weighted = self.selection == "weighted"
        if single:
            route = Route(
                federation,
                holders,
                wanted,
                chunk_size=self.chunk_size,
                retain=self.retain,
                weighted=weighted,
                window=window,
            )
            weights, optimizer, metrics = single_epoch(federation, state.weights, route)
        else:
            size = self.batch_size or config.training.batch_size
            pairs = has_batchnorm(config.model.module)
            plan = BatchPlan(federation, holders, wanted, size, weighted=weighted, window=window, pairs=pairs)
            weights, optimizer, metrics = batch_epoch(
                federation,
                state.weights,
                state.optimizer,
                plan,
                self.server,
                scale=self._scale(config),
                local_steps=self.local_steps,
            )
            if plan.held_back or config.privacy.min_samples > 1:
                metrics["held_back"] = plan.held_back
        metrics |= communication(weights, metrics["transfers"], config.clients, federation.round)
        return StratifyState(weights, holders, optimizer), metrics | {"scheduled": len(wanted)}

    def _phase(self, config: Agreed, round: int) -> tuple[bool, tuple[float, float]]:
        """Whether a round goes sample by sample, and which part of the data is there in it."""
        if self.mode != "hybrid":
            return self.mode == "single", (0.0, 1.0)
        before = self._pretraining(config)
        if round <= before:
            return False, (0.0, 1.0 - self.stream)
        part = self.stream / (config.training.rounds - before)
        begin = 1.0 - self.stream + part * (round - before - 1)
        return True, (begin, min(begin + part, 1.0))
