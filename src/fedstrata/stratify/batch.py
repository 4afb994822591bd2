"""Run Stratify's batch mode on the server: each batch consists of samples of many clients (Algorithms 2 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.base.arrays import Bools, Floats, Ints
from fedstrata.base.errors import ReplyRefusedError, SpecError
from fedstrata.base.records import Tree
from fedstrata.clients.training.steps import clipped
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Summed
from fedstrata.federation.messages import Weights
from fedstrata.federation.settings import Training, scheduled
from fedstrata.stratify.messages import (
    NO_SUCH_BATCH,
    GatheredReply,
    Gradient,
    GradientReply,
    GradientSteps,
    LabelWeightedGradient,
    Reserve,
    ReserveReply,
)
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import label_weights
from fedstrata.stratify.secure import GradientForm, ask_gradients
from fedstrata.stratify.selection import select_batches

LRRule = Literal["none", "linear", "sqrt"]


@cache
def sgd(momentum: float, weight_decay: float) -> ServerOptimizer:
    """Return the server's default optimiser: SGD with the momentum and the weight decay of ``training``."""
    return ServerOptimizer(momentum=momentum, weight_decay=weight_decay)


@dataclass(frozen=True)
class BatchMode:
    """Batch mode, in which each batch consists of samples of many clients. ``Stratify`` describes the fields."""

    batch_size: int | None
    lr_rule: LRRule
    local_steps: int
    server: ServerOptimizer | None
    label_weights: bool = False

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if BatchNorm would get batches with only one sample."""
        if config.model.has_batchnorm and (self.batch_size or config.training.batch_size) == 1:
            key = "training.batch_size" if self.batch_size is None else "method.batch_size"
            raise SpecError(key, "BatchNorm requires at least two samples per batch. Set batch_size to at least 2.", 1)

    def rate(self, training: Training, round: int) -> float:
        """Return the learning rate of a round's batches: the product of three factors.

        The factors are the clients' learning rate in the round, the server's learning rate in the round (1 without
        ``server``), and the factor of ``lr_rule``.
        """
        server = self.server
        factor = 1.0 if server is None else scheduled(server.lr or 1.0, server.schedule, round, training.rounds)
        ratio = (self.batch_size or training.batch_size) / training.batch_size
        scale = float(ratio ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_rule])
        return training.lr_at(round) * factor * scale

    def form(self, config: FederationConfig) -> GradientForm:
        """Return the object that encodes the clients' gradients for secure sums (``privacy.sums``)."""
        return GradientForm(config, self.batch_size or config.training.batch_size, self.local_steps)

    def run_epoch(
        self, roster: Roster, wanted: Ints, weights: Weights, optimizer: Tree
    ) -> tuple[Weights, Tree, dict[str, Any]]:
        """Train one epoch. For each batch, ask the clients once, and take one step of the server's optimiser.

        Args:
            roster: The clients that the server can ask.
            wanted: For each of the L positions of the schedule, the label to train on, as an index into
                ``roster.holders.placeholders``, shape (L,).
            weights: The global model.
            optimizer: The state of the server's optimiser.

        Returns:
            The new model, the optimiser's new state and the metrics.
        """
        federation = roster.federation
        training, together = federation.config.training, federation.config.model.has_batchnorm
        plan = BatchPlan(roster, wanted, self.batch_size or training.batch_size, pairs=together)
        plan.reserve(np.arange(len(wanted)))
        lr = self.rate(training, federation.round)
        server = self.server or sgd(training.momentum, training.weight_decay)
        stepper = Stepper(server, weights.params, optimizer, lr=lr)
        samples, weight, loss, transfers, scaled = 0, 0.0, 0.0, 0, 0
        form = self.form(federation.config) if federation.config.privacy.sums == "secure" else None
        factors = self._factors(roster, wanted) if self.label_weights else None
        for batch in range(plan.batches):
            request = self._request(federation.round, batch, weights, lr, factors)
            total = self._secure_sum(plan, request, form) if form else self._sum(plan, request, together)
            if total is None:
                continue
            reply: GradientReply = total.reply
            if training.clip is None:
                stepper.step(reply.gradient, reply.size)
            else:
                with torch.no_grad():
                    mean = torch._foreach_div(list(reply.gradient.values()), float(reply.size))
                    short = clipped(mean, training.clip)
                stepper.step(dict(zip(reply.gradient, short, strict=True)))
            weights = Weights(stepper.params, reply.buffers)
            samples += reply.samples
            weight += reply.size
            loss += reply.loss
            scaled += total.scaled
            transfers += len(total.clients)
            # Free this gradient before the next gradient arrives, because the processor's cache has no room for both.
            del total, reply
        # Copy the tensors, because the stepper would change them in its next step.
        weights = Weights({name: w.clone() for name, w in weights.params.items()}, weights.buffers)
        metrics = {"samples": samples, "train_loss": loss / weight if weight else None, "transfers": transfers}
        if form is not None:
            metrics["scaled"] = scaled
        if plan.held_back or federation.config.privacy.min_samples > 1:
            metrics["held_back"] = plan.held_back
        return weights, stepper.state(), metrics

    def _factors(self, roster: Roster, wanted: Ints) -> Tensor:
        """Return the weight of each placeholder's label in the loss, shape (C,); 1 for unused placeholders."""
        holders = roster.holders
        weights = label_weights(holders.totals, np.bincount(wanted, minlength=len(holders.placeholders)))
        factors = torch.ones(roster.federation.config.strata)
        factors[torch.from_numpy(holders.placeholders)] = torch.from_numpy(weights).float()
        return factors

    def _request(self, round: int, batch: int, weights: Weights, lr: float, factors: Tensor | None) -> Gradient:
        """Return the request for the gradient of a batch; see ``GradientSteps`` and ``LabelWeightedGradient``."""
        if factors is not None:
            return LabelWeightedGradient(round, batch, weights, factors)
        if self.local_steps > 1:
            return GradientSteps(round, batch, weights, self.local_steps, lr)
        return Gradient(round, batch, weights)

    def _sum(self, plan: BatchPlan, request: Gradient, together: bool) -> Summed | None:
        """Return the sum of the clients' replies for one batch; None if no client is left.

        A client that fails is left out of this batch. In later batches, samples of other clients replace the failed
        client's samples.
        """
        federation, steps = plan.roster.federation, self.local_steps
        while samples := plan.work(request.batch):
            if together and sum(samples.values()) < 2:
                # The remaining client did not fail, so it stays in the plan for later batches.
                federation.note("batch skipped", samples, "it has only one sample left, but BatchNorm needs two")
                return None
            work = samples if steps == 1 else {client: steps * count for client, count in samples.items()}
            total = federation.ask_sum(samples, request, together=together, work=work)
            absent = set(samples) - set(total.clients if total else ())
            if not absent:
                return total
            # Without a sum, all clients of the batch count as absent, although some may have replied. Remove only those
            # that failed or were late. If the log names none of them, remove all clients of the batch.
            lost = absent if total else (absent & federation.log.absent()) or absent
            plan.lose(lost, request.batch)
            if total:
                return total
        return None

    def _secure_sum(self, plan: BatchPlan, request: Gradient, form: GradientForm) -> Summed | None:
        """Return the sum of the clients' replies for one batch; None if too few clients have samples or send replies.

        Clients are asked only once per batch, because two sums over different clients could reveal a single reply.
        """
        federation, samples = plan.roster.federation, plan.work(request.batch)
        least = federation.config.privacy.parties
        if len(samples) < least:
            reason = f"it has samples of {len(samples)} clients, but a secure sum needs {least}"
            federation.note("batch skipped", samples, reason)
            return None
        work = {client: self.local_steps * count for client, count in samples.items()}
        total = ask_gradients(federation, samples, request, form, work)
        if lost := set(samples) & federation.log.absent():
            plan.lose(lost, request.batch)
        return total


class BatchPlan:
    """The plan of an epoch: a client and one of its reserved samples for each position of the schedule.

    The schedule is the sequence of labels of the epoch, and a position is one entry of the schedule. A single request
    asks a client to reserve samples for all batches of the epoch. If a client has no sample for a position, another
    client is asked.

    A client must not train on fewer than ``privacy.min_samples`` samples of a batch. If a client has fewer samples in a
    batch, it moves these samples to another batch, or does not reserve them (*holds them back*).

    Args:
        roster: The clients that the server can ask.
        wanted: The label to train on at each position, as an index into ``roster.holders.placeholders``, shape (L,).
        batch_size: The number of positions in a batch.
        pairs: Whether every batch must have at least two samples, as BatchNorm requires.
    """

    def __init__(self, roster: Roster, wanted: Ints, batch_size: int, *, pairs: bool = False) -> None:
        self.roster, self.wanted = roster, wanted
        self.batch_of = np.arange(len(wanted)) // batch_size
        if pairs and len(wanted) > 1 and len(wanted) % batch_size == 1:
            self.batch_of[-1] -= 1  # A last batch of one sample is merged with the previous batch.
        self.batches = int(self.batch_of[-1]) + 1 if len(wanted) else 0
        self.owner = np.full(len(wanted), -1, dtype=np.int64)
        self.held_back = 0
        """The number of positions without training, because a client would have had too few samples in a batch."""
        self._work: list[dict[int, float]] | None = None
        self._refilled, self._waiting = np.zeros((2, len(roster.places)), dtype=bool)
        """Two bools for each of the R pairs (label, client) of ``roster``.

        ``_refilled``: the client may use all its samples of the label again, and has not reported yet that these
        samples are used up. ``_waiting``: the client held back samples of the label, but could train on them if it
        got more positions.
        """
        self._last = np.zeros(len(roster.holders.placeholders), dtype=bool)
        """For each label, whether clients hold back all unused samples of the label, shape (P,)."""

    def work(self, batch: int) -> dict[int, float]:
        """Return each client's number of samples in a batch, as a mapping in ascending order of the clients."""
        if self._work is None:
            served = self.owner >= 0
            clients = self.roster.federation.config.clients
            cells, counts = np.unique(self.batch_of[served] * clients + self.owner[served], return_counts=True)
            begins = np.searchsorted(cells // clients, np.arange(self.batches + 1)).tolist()
            owners, samples = (cells % clients).tolist(), counts.astype(float).tolist()
            self._work = [dict(zip(owners[i:j], samples[i:j], strict=True)) for i, j in pairwise(begins)]
        return self._work[batch]

    def lose(self, clients: set[int], batch: int) -> None:
        """Remove clients that failed in ``batch``, and give their positions in later batches to other clients."""
        self._remove(clients)
        theirs = np.flatnonzero(np.isin(self.owner, list(clients)))
        self.owner[theirs] = -1
        later = theirs[self.batch_of[theirs] > batch]
        self.reserve(later[np.argsort(self.batch_of[later], kind="stable")])

    def reserve(self, positions: Ints) -> None:
        """For each position, find a client with an unused sample, and let the client reserve the sample."""
        self._work = None
        while len(positions):
            wanted = self.wanted[positions]
            clients, weights = self._choices(wanted)
            owner = select_batches(wanted, self.batch_of[positions], clients, weights, self.roster.generator)
            self.owner[positions] = owner
            positions = self._ask_owners(positions[owner >= 0])

    def _choices(self, wanted: Ints) -> tuple[dict[int, Ints], dict[int, Floats] | None]:
        """Return, for each label, the clients with unused samples.

        If all samples of a label have been used, let the clients use these samples again.

        Args:
            wanted: The labels, as indices into ``roster.holders.placeholders``.

        Returns:
            Two mappings from each label's index: one to the clients with unused samples, and one to the weights of
            these clients. The second mapping is None if selection is uniform.
        """
        roster, clients, weights = self.roster, dict[int, Ints](), dict[int, Floats]()
        for place in np.unique(wanted).tolist():
            rows = roster.rows[place]
            if not roster.available[rows].any():
                if self._waiting[rows].any():
                    roster.available[rows], self._waiting[rows] = self._waiting[rows], False
                    self._last[place] = True
                elif roster.refill(place, int((wanted == place).sum())):
                    self._refilled[rows] |= roster.present[rows]
                    self._last[place] = False
            available = roster.available[rows]
            clients[place] = roster.holders.clients[rows][available]
            weights[place] = roster.holders.counts[rows][available].astype(np.float64)
        return clients, weights if roster.weighted else None

    def _ask_owners(self, positions: Ints) -> Ints:
        """Ask the chosen clients to reserve samples for positions. Return the positions that still need a client."""
        if len(positions) == 0:
            return positions
        roster = self.roster
        owners = self.owner[positions]
        order = np.argsort(owners, kind="stable")
        clients, begins = np.unique(owners[order], return_index=True)
        positions_of = dict(zip(clients.tolist(), np.split(positions[order], begins[1:]), strict=True))
        requests = {}
        for client, theirs in positions_of.items():
            fields = roster.request(client, self.wanted[theirs], roster.refills.pop(client, ()))
            requests[client] = Reserve(batches=torch.from_numpy(self.batch_of[theirs]), **fields)
        replies: dict[int, ReserveReply] = roster.federation.ask(requests, requests, check=self._check)
        roster.answered.update(replies)
        if lost := set(requests) - set(replies):
            self._remove(lost)
        still_open = []
        for client, theirs in positions_of.items():
            reply = replies.get(client)
            missing = np.ones(len(theirs), dtype=bool) if reply is None else reply.missing.numpy()
            self.owner[theirs[missing]] = -1
            again = missing
            if isinstance(reply, GatheredReply):
                self.batch_of[theirs[~missing]] = reply.batches.numpy()[~missing]
                again = missing & ~self._give_up(client, theirs, missing, reply.held.numpy())
            still_open.append(theirs[again])
            if reply is not None:
                wanted = self.wanted[theirs]
                rows = roster.empty_rows(client, wanted[missing], reply.exhausted)
                roster.available[rows] = False
                # If a client has no sample of a label, although it may use all its samples again, do not ask it for
                # this label again.
                useless = self._refilled[rows] & ~np.isin(roster.places[rows], wanted[~missing])
                roster.present[rows[useless]] = self._refilled[rows] = False
        left = np.sort(np.concatenate(still_open))
        return left[np.argsort(self.batch_of[left], kind="stable")]

    def _check(self, reply: ReserveReply) -> None:
        """Raise ``ReplyRefusedError`` if the reply moves a sample to a batch after the last batch."""
        if isinstance(reply, GatheredReply) and bool((reply.batches[~reply.missing] >= self.batches).any()):
            raise ReplyRefusedError(NO_SUCH_BATCH)

    def _give_up(self, client: int, theirs: Ints, missing: Bools, held: Bools) -> Bools:
        """Decide which positions are *given up* (trained by no client) after a client held back its samples.

        A client holds back a sample if the client has too few samples for a batch. A position is given up if clients
        hold back all unused samples of the position's label. Without this rule, a client would train on a sample a
        second time. Positions that are not given up go to other clients.

        Args:
            client: The client.
            theirs: The positions of the schedule for which the client should reserve samples, shape (n,).
            missing: For each position, True if the client did not reserve a sample, shape (n,).
            held: For each position, True if the client has a sample, but holds the sample back, shape (n,).

        Returns:
            For each position, True if the position is given up, shape (n,).
        """
        wanted = self.wanted[theirs]
        none_left = np.unique(wanted[missing & ~held])
        for place in np.unique(wanted[held]).tolist():
            # Let the client wait. It is chosen again when the label has no other unused samples. If the client then
            # holds its samples back again, its positions are given up.
            if not self._last[place] or place not in none_left:
                rows = self.roster.rows[place]
                self._waiting[rows] |= self.roster.holders.clients[rows] == client
        given_up: Bools = held & self._last[wanted]
        if count := int(given_up.sum()):
            self.held_back += count
            reason = f"{count} positions: the client has too few samples in the batch"
            self.roster.federation.note("held back", [client], reason)
        return given_up

    def _remove(self, clients: set[int]) -> None:
        self.roster.remove(clients)
        self._waiting[np.isin(self.roster.holders.clients, list(clients))] = False
