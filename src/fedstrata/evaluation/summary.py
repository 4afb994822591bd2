"""Summarise a run as text for the terminal, the HTML report, notebooks and the status page."""

from __future__ import annotations

from fedstrata.evaluation.history import History, column_of, target_text

MISSING = "–"
"""The text that stands for a missing value."""


def summary_lines(history: History) -> list[tuple[str, str]]:
    """Return the lines of a run's summary, as pairs of a heading and a text."""
    summary = history.summary
    rounds = f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'}"
    metric = history.primary
    final, best = (_shown(metric, summary[f"{when}_{metric}"]) for when in ("final", "best"))
    kept = "" if history.saved is None else ", of the saved model"
    kept += f" (round {history.model_round})" if history.model_round is not None else ""
    lines = [(metric, f"{final} after {rounds}{kept}")]
    if summary["best_round"] is not None:
        by = "selected on validation samples" if summary["best_on"] == "validation" else "selected on the test set"
        lines.append(("best", f"{best} in round {summary['best_round']}, {by}"))
    lines += [("measured", ", ".join(metrics))] if (metrics := _metrics(history)) else []
    if history.warning:
        lines.append(("warning", history.warning))
    if history.stopped:
        lines.append(("stopped", history.stopped))
    if targets := [f"{target} in round {round}" for target, round in reached(history).items()]:
        lines.append(("reached", ", ".join(targets)))
    if invited := history.total("clients_invited"):
        share = history.total("clients_returned") / invited
        names = (("dropped", "dropped out"), ("late", "late"), ("failed", "failed"))
        absent = [f", {n:,.0f} {name}" for fate, name in names if (n := history.total(f"clients_{fate}"))]
        lines.append(("returned", f"{percent(share, 1)} of the invited clients{''.join(absent)}"))
    lines.append(("trained", f"{summary['samples']:,} samples in {summary['seconds']:,.1f} s"))
    up, down = (summary[key] * 1e-6 for key in ("bytes_up", "bytes_down"))
    lines.append(("sent", f"{up:,.1f} MB by clients, {down:,.1f} MB to clients"))
    if history and (epsilon := history[-1].get("epsilon")) is not None:
        statement = history[-1].get("privacy", {})
        meaning = history.privacy or statement.get("noise", "")
        text = f"ε = {epsilon:.2f} per {statement.get('unit', 'sample')}"
        lines.append(("privacy", f"{text}; {meaning}" if meaning else text))
    if history.path is not None:
        lines.append(("folder", str(history.path)))
    return lines


def _metrics(history: History) -> list[str]:
    """Return the metrics of the saved model on the test set, except the primary metric."""
    last: dict[str, float | None] = next((record["test"] for record in reversed(history) if record.get("test")), {})
    names = [*(["accuracy"] if history.final_accuracy is not None else []), *last]
    return [
        f"{name} {_shown(name, history.final(column_of(name)))}"
        for name in dict.fromkeys(names)
        if name != history.primary
    ]


def _shown(metric: str, value: float | None) -> str:
    return percent(value) if metric == "accuracy" else MISSING if value is None else f"{value:.4f}"


def reached(history: History) -> dict[str, int]:
    """Return the targets that a run reached, as a mapping from target to the first round that reached it.

    >>> reached(History([{"round": 1, "accuracy": 0.6, "test": {"rmse": 2.5}}], metric_targets={"rmse": [3]}))
    {'50 %': 1, 'rmse 3': 1}
    """
    rounds = {f"{target * 100:g} %": history.rounds_to_target(target) for target in history.targets}
    for metric, targets in history.metric_targets.items():
        rounds |= {f"{metric} {target_text(target)}": history.rounds_to_target(target, metric) for target in targets}
    return {target: round for target, round in rounds.items() if round is not None}


def percent(fraction: float | None, digits: int = 2) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"
