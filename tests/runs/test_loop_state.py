"""The state of a run beside the method's: which evaluation is the best, who was heard of, what a checkpoint keeps."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from fedstrata.base import records
from fedstrata.evaluation.evaluator import Score
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.communication.compression import CompressionState
from fedstrata.runs.loop_state import LoopState

VALIDATED = Evaluation(validation=0.1, unheard=2)


def scored(validation: float | None, accuracy: float = 0.5) -> Score:
    return Score(1.0, accuracy, [accuracy], np.array([[3]]), {"validation": {"accuracy": validation}})


def after(*values: float | None, settings: Evaluation = VALIDATED) -> LoopState:
    """Evaluations in the rounds 1, 2 and so on, with these values on the validation samples."""
    state = LoopState(np.zeros(3, dtype=np.int64))
    for round, value in enumerate(values, start=1):
        state.add_score(scored(value), round, settings)
    return state


def best_of(state: LoopState) -> tuple[int, float | None]:
    assert state.best is not None
    return state.best.round, state.best.value


def test_the_best_is_the_first_of_the_largest_values() -> None:
    assert best_of(after(0.5, 0.75, 0.75, 0.25)) == (2, 0.75)
    assert best_of(after(None, 0.25, None)) == (2, 0.25)
    assert best_of(after(None, None)) == (1, None)


def test_without_validation_samples_the_test_set_decides() -> None:
    state = after(0.1, 0.9, settings=Evaluation())
    assert best_of(state) == (1, 0.5)


def test_who_is_unheard_is_counted_in_evaluations() -> None:
    """The last two evaluations were in rounds 2 and 3. A reply in round 2 came before the first of them."""
    state = after(0.5, 0.5)
    state.last_reply = np.array([0, 1, 2])
    assert state.unheard(2) == [0, 1]
    state.add_score(scored(0.5), 3, VALIDATED)
    assert state.evaluated == [2, 3]
    assert state.unheard(2) == [0, 1, 2]
    # As long as there were fewer evaluations than that, only those are unheard that never replied.
    assert state.unheard(3) == [0]


def test_a_checkpoint_keeps_everything_that_decides_how_the_run_goes_on() -> None:
    state = after(0.5, 0.75, 0.25)
    state.last_reply, state.memory, state.stopped = np.array([3, 0, 2]), {"callback": {"since": 1}}, "enough"
    channel = CompressionState(4, 2, b"d", {}, [], np.array([2, -1, 2]), {})
    saved = records.decode(records.encode(state.save(channel)))
    again = LoopState(np.zeros(3, dtype=np.int64))
    again.restore(saved)
    assert records.encode(again.save(saved.channel)) == records.encode(state.save(channel))
    left_out = {"final_model", "score", "late_events"}
    for name in {field.name for field in fields(LoopState)} - left_out - {"last_reply", "last", "best"}:
        assert getattr(again, name) == getattr(state, name), name
    assert (best_of(again), again.last_reply.tolist()) == ((2, 0.75), [3, 0, 2])
