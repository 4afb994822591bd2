"""Run Stratify's hybrid mode: batch mode in early rounds, and then single-sample mode on data that arrive later."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.base.errors import SpecError
from fedstrata.federation.allowed import Agreed
from fedstrata.federation.engine import FederationConfig
from fedstrata.stratify.batch import BatchMode
from fedstrata.stratify.single import SingleMode


@dataclass(frozen=True)
class HybridMode:
    """Hybrid mode: batch mode in early rounds, then single-sample mode. ``Stratify`` describes the fields."""

    batches: BatchMode
    singles: SingleMode
    pretraining: int | None
    stream: float

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if single-sample mode is impossible, or if no rounds are left for this mode."""
        self.singles.check(config, "hybrid")
        before, rounds = self.batch_rounds(config), config.training.rounds
        if before >= rounds:
            smaller = f"Set method.pretraining to at most {rounds - 1}, or set" if rounds > 1 else "Set"
            problem = f"leaves no rounds for mode 'single'. {smaller} training.rounds to at least {before + 1}."
            raise SpecError("method.pretraining", problem, before)

    def batch_rounds(self, agreed: Agreed) -> int:
        """Return the number of rounds in batch mode. These are the first rounds of the run."""
        return self.pretraining or max(1, agreed.training.rounds // 2)

    def phase(self, agreed: Agreed, round: int) -> tuple[BatchMode | SingleMode, tuple[float, float]]:
        """Return the mode of a round, and the range of each client's samples that may be used in the round.

        The range is a pair of fractions (from, to) in [0, 1]. For each label, the client's samples are sorted by their
        time of arrival.
        """
        before = self.batch_rounds(agreed)
        if round <= before:
            return self.batches, (0.0, 1.0 - self.stream)
        part = self.stream / (agreed.training.rounds - before)
        begin = 1.0 - self.stream + part * (round - before - 1)
        return self.singles, (begin, min(begin + part, 1.0))
