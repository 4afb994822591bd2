"""Callbacks for tests; a spec names them ``"watching:NAME"``."""

from __future__ import annotations

import fedstrata as fs


class Enough(fs.Callback):
    """Ends the run after some rounds, and counts the calls of its methods."""

    rounds: int = 2

    def on_start(self, simulation):
        self.calls = ["start"]

    def on_round(self, simulation, record):
        self.calls.append(record["round"])
        if record["round"] == self.rounds:
            simulation.stop("that is enough")

    def on_end(self, simulation, history):
        self.calls.append("end")


class Counter(fs.Callback):
    """Stores the rounds that it has seen in the run's memory, which survives a kill."""

    def on_round(self, simulation, record):
        simulation.memory["rounds"] = [*simulation.memory.get("rounds", []), record["round"]]


class Clumsy(fs.Callback):
    """Raises an error after some rounds, but only once."""

    rounds: int = 2
    once: bool = True

    def on_round(self, simulation, record):
        if record["round"] == self.rounds and not simulation.memory.get("raised"):
            simulation.memory["raised"] = self.once
            raise ZeroDivisionError("on purpose")
