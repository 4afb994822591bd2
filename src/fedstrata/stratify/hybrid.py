"""Stratify's hybrid mode: rounds of batches, then rounds of single samples on data that arrive later."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.base.errors import SpecError
from fedstrata.federation.allowed import Agreed
from fedstrata.federation.engine import FederationConfig
from fedstrata.stratify.batch import BatchMode
from fedstrata.stratify.single import SingleMode


@dataclass(frozen=True)
class HybridMode:
    """The mode that trains rounds of batches, then rounds of single samples; ``Stratify`` describes the fields."""

    batches: BatchMode
    singles: SingleMode
    pretraining: int | None
    stream: float

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if training on single samples is impossible, or if there would be no such rounds."""
        self.singles.check(config, "hybrid")
        before, rounds = self.batch_rounds(config), config.training.rounds
        if before >= rounds:
            problem = f"leaves no rounds for single-sample mode. Use at most {rounds - 1}, or raise training.rounds."
            raise SpecError("method.pretraining", problem, before)

    def batch_rounds(self, agreed: Agreed) -> int:
        """Return how many of the first rounds train in batches."""
        return self.pretraining or max(1, agreed.training.rounds // 2)

    def phase(self, agreed: Agreed, round: int) -> tuple[BatchMode | SingleMode, tuple[float, float]]:
        """Return the object that trains a round, and the share of each client's samples that the round may use.

        The share is (from, to), in [0, 1]: for each label, the samples are sorted by their time of arrival.
        """
        before = self.batch_rounds(agreed)
        if round <= before:
            return self.batches, (0.0, 1.0 - self.stream)
        part = self.stream / (agreed.training.rounds - before)
        begin = 1.0 - self.stream + part * (round - before - 1)
        return self.singles, (begin, min(begin + part, 1.0))
