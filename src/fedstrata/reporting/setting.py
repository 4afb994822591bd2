"""Describe the settings that all runs of a comparison share, and the settings that differ between methods."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstrata.base.printable import printable
from fedstrata.reporting.runs import LABELS, Run

SHOWN = 3
"""The maximum number of values listed per setting."""
SEEDS = 40
"""The maximum number of seeds in a suggested command."""

Part = tuple[str, str]
"""The type of a part of the description: emphasised words, and the text after them."""

_PARAMETERS = ("alpha", "per_client", "exponent", "hidden")
"""The settings that the description shows beside the name of a partition or model."""


def setting_line(runs: Mapping[str, Sequence[Run]]) -> list[Part]:
    """Describe the settings that runs share: clients, partition, availability, rounds, model, seeds and version.

    Args:
        runs: The runs of each method. The description leaves out settings that the runs' specs do not contain.
    """
    specs = [flat(run.spec) for members in runs.values() for run in members]
    seeds = sorted({run.history.seed for members in runs.values() for run in members if run.history.seed is not None})
    listed = f" ({', '.join(map(str, seeds))})" if 1 < len(seeds) <= 10 else ""
    clients, partition = _values(specs, "partition.clients"), _named(specs, "partition")
    words = f"{clients} client{'' if clients == '1' else 's'}" if clients else ""
    parts: list[Part] = [(words, f"{', ' if words and partition else ''}{partition}")]
    online = _values(specs, "availability.p", 100)
    if online:
        parts.append((f"{online} %", " of the invited clients are online"))
    elif (model := _named(specs, "availability")) == "always":
        parts.append(("100 %", " of the invited clients are online"))
    elif model:
        parts.append((model, " availability"))
    if invited := _values(specs, "training.clients_per_round"):
        parts.append((invited, " clients invited per round"))
    if rounds := _values(specs, "training.rounds"):
        parts.append((f"{rounds} round{'' if rounds == '1' else 's'}", ""))
    parts.append(("", _named(specs, "model")))
    if seeds:
        several = (f"{len(seeds)} seeds", listed) if len(seeds) > 1 else ("", f"seed {seeds[0]}")
        parts.append(several)
    parts += [("", _versions(runs))]
    return [part for part in parts if any(part)]


def count_runs(runs: Mapping[str, Sequence[Run]]) -> str:
    """Describe how many runs are finished, such as ``17 of 18 runs finished``."""
    members = [run for each in runs.values() for run in each]
    planned = max(len(members), len(runs) * len({run.history.seed for run in members}))
    return f"{sum(run.finished for run in members)} of {planned} run{'' if planned == 1 else 's'} finished"


def differences(runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, list[str]]]:
    """For each method, list its values of the settings that differ between methods, as ``key = value``.

    The seed and the method's name are not listed. The settings of a method come from its first run.
    """
    specs = {label: flat(members[0].spec) for label, members in runs.items()}
    keys = list(dict.fromkeys(key for spec in specs.values() for key in spec))
    differing = [
        key
        for key in keys
        if key not in ("seed", "method.name") and len({_text(spec.get(key)) for spec in specs.values()}) > 1
    ]
    return [
        (label, [f"{key} = {_text(spec[key])}" for key in differing if key in spec]) for label, spec in specs.items()
    ]


def command(folder: Path, runs: Mapping[str, Sequence[Run]], seeds: int) -> str | None:
    """Return the command that adds seeds to a comparison; None if ``fedstrata compare`` did not write the folder.

    Args:
        folder: The folder. If the path is absolute, the command contains only the folder's name.
        runs: The runs in the folder.
        seeds: The comparison's new number of seeds. For more than ``SEEDS`` seeds, the function returns None.
    """
    if not (folder / LABELS).is_file() or seeds > SEEDS:
        return None
    before = sorted({run.history.seed for each in runs.values() for run in each if run.history.seed is not None})
    more = [seed for seed in range(seeds) if seed not in before][: max(seeds - len(before), 0)]
    place = folder.name if folder.is_absolute() else folder.as_posix()
    numbers = ",".join(map(str, [*before, *more]))
    return f"fedstrata compare SPEC.toml --seeds {numbers} --out {shlex.quote(printable(place))}"


def flat(spec: str) -> dict[str, Any]:
    """Return a mapping from full keys, such as ``partition.alpha``, to the settings of a spec."""
    return dict(_flatten(tomllib.loads(spec)))


def _flatten(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict, bool)) else str(value)


def _values(specs: Sequence[Mapping[str, Any]], key: str, factor: int = 1) -> str:
    """Return the values of a setting in words, such as ``20 or 100``; empty if specs do not contain the setting."""
    numbers = sorted({spec[key] * factor for spec in specs if isinstance(spec.get(key), (int, float))})
    if len(numbers) > SHOWN:
        return f"{numbers[0]:.6g} to {numbers[-1]:.6g}"
    return " or ".join(f"{number:.6g}" for number in numbers)


def _named(specs: Sequence[Mapping[str, Any]], section: str) -> str:
    """Return the names in a section of the specs, with their main settings, such as ``dirichlet (alpha 0.3)``."""
    names = dict[str, None]()
    for spec in specs:
        if (name := spec.get(f"{section}.name", spec.get(section))) is None:
            continue
        given = [(each, spec[f"{section}.{each}"]) for each in _PARAMETERS if f"{section}.{each}" in spec]
        more = [f"{key.replace('_', ' ')} {_text(value).strip('[]')}" for key, value in given]
        names[f"{name} ({', '.join(more)})" if more else str(name)] = None
    return " or ".join(names) if len(names) <= SHOWN else f"{len(names)} kinds of {section}"


def _versions(runs: Mapping[str, Sequence[Run]]) -> str:
    versions = dict[str, None]()
    for run in (run for members in runs.values() for run in members):
        with suppress(OSError, ValueError, KeyError, TypeError):  # A folder that contains only metrics lacks run.json.
            made_with = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))["made_with"]
            versions[str(made_with["fedstrata"])] = None
    return f"fedstrata {' and '.join(versions)}" if versions else ""
