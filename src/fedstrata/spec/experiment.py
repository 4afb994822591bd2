"""The specification (spec) of an experiment, in Python and in TOML."""

from __future__ import annotations

import copy
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, model_validator

from fedstrata.base.config import Setting, build, from_word
from fedstrata.base.errors import SpecError, not_among
from fedstrata.data.partitions.base import AnyPartition
from fedstrata.data.partitions.schemes import Dirichlet
from fedstrata.data.sources import Data
from fedstrata.data.tasks.base import AnyTask, Task
from fedstrata.data.tasks.classification import Classification
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.attacks import AnyAttack
from fedstrata.federation.availability import Always, AnyAvailability
from fedstrata.federation.communication.codecs import Communication
from fedstrata.federation.settings import Privacy, Training
from fedstrata.methods.base import METHODS, AnyMethod
from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.zoo import MLP, AnyModel
from fedstrata.spec.callbacks import AnyCallback, EarlyStopping, KeepBest
from fedstrata.spec.tracking import Tracking

COMPARE = "compare"
"""The section of a spec file that defines a comparison. Each table ``[compare.LABEL]`` contains the changes for
one experiment."""

EXCLUSIVE = {"local_epochs": "local_steps", "local_steps": "local_epochs", "indices": "file", "file": "indices"}
"""Pairs of mutually exclusive keys. An override of one key removes the other key."""

LARGEST_SEED = 2**128 - 1
"""The maximum seed. Random generators use keys of 128 bits, so larger seeds have no benefit."""


class Experiment(Setting):
    """All settings of an experiment.

    Args:
        seed: Seed of all random numbers of the experiment.
        data: Data set, with its training and test samples.
        task: Task of the model: ``classification``, ``regression``, ``multilabel``, ``next-token``, ``segmentation``,
            or a task of your own. Default: ``regression`` if some targets are not integers, otherwise
            ``classification``.
        partition: Partition, which assigns the training samples to clients.
        availability: Model of dropouts and delays: whether and how fast clients reply in a round.
        attack: Simulated attack by some of the clients. Default: all clients are honest.
        method: Federated learning method, such as ``fedavg`` or ``scaffold``.
        model: Architecture of the model.
        training: Settings of rounds, local training and hardware.
        evaluation: Settings of evaluations and checkpoints.
        communication: Compression of models and updates.
        privacy: Secure sums, minimum numbers of samples, and differential privacy.
        callbacks: Callbacks, which observe the run and may stop it, such as ``["early-stopping"]``.
        tracking: Programs that display the run, such as TensorBoard. These programs do not change results.

    >>> spec = Experiment(method="scaffold", training={"rounds": 3})
    >>> spec.method.name, spec.training.rounds, spec.data.name
    ('scaffold', 3, 'digits')
    """

    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    data: Annotated[Data, from_word(Data, "name")] = Data()
    task: AnyTask | None = None
    partition: AnyPartition = Dirichlet(alpha=0.5)
    availability: AnyAvailability = Always()
    attack: AnyAttack | None = None
    method: AnyMethod = FedAvg()
    model: AnyModel = MLP()
    training: Annotated[Training, from_word(Training)] = Training()
    evaluation: Annotated[Evaluation, from_word(Evaluation)] = Evaluation()
    communication: Annotated[Communication, from_word(Communication)] = Communication()
    privacy: Annotated[Privacy, from_word(Privacy)] = Privacy()
    callbacks: list[AnyCallback] = []
    tracking: Annotated[Tracking, from_word(Tracking)] = Tracking()

    @model_validator(mode="after")
    def _measure_task(self) -> Experiment:
        """Replace the default metric (accuracy) with the task's default metrics."""
        if self.task is not None:
            self.__dict__["evaluation"] = self.evaluation.of_task(self.task)
        return self

    def with_task(self, task: Task) -> Experiment:
        """Return a copy with the task derived from the data. If the spec sets a task, return the experiment itself."""
        if self.task is not None or task == Classification():
            return self
        evaluation = self.evaluation.of_task(task)
        callbacks = [
            each.model_copy(update={"metric": evaluation.primary})
            if getattr(each, "metric", None) == self.evaluation.primary
            else each
            for each in self.callbacks
        ]
        return self.model_copy(update={"task": task, "evaluation": evaluation, "callbacks": callbacks})

    @model_validator(mode="after")
    def _compare_primary(self) -> Experiment:
        """If a callback has no metric, use the primary metric, so that the run folder's spec contains the metric."""
        for place, callback in enumerate(self.callbacks):
            if isinstance(callback, EarlyStopping | KeepBest) and callback.metric is None:
                self.callbacks[place] = callback.model_copy(update={"metric": self.evaluation.primary})
        return self

    def to_spec(self) -> dict[str, Any]:
        """Return the spec as nested dicts.

        Leave out sections that have no effect and did not exist in earlier versions.
        """
        without_effect = {
            "communication": self.communication.plain,
            "privacy": self.privacy == Privacy(),
            "callbacks": not self.callbacks,
            "tracking": not self.tracking.callbacks,
        }
        return {key: value for key, value in super().to_spec().items() if not without_effect.get(key)}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Experiment:
        """Create an experiment from nested dicts, such as parsed TOML. The section ``compare`` is ignored.

        Raises:
            SpecError: A key is unknown or a value is wrong.
        """
        return build(cls, {key: value for key, value in table.items() if key != COMPARE})

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
        """Create an experiment from a TOML file and from overrides of the form ``section.key=value``.

        Raises:
            SpecError: The file is missing or not TOML, a key is unknown, or a value is wrong. The message contains the
                line number.
        """
        table = read_table(path, overrides)
        try:
            return cls.from_table(table)
        except SpecError as error:
            raise with_location(error, path) from None

    def replace(self, **sections: Any) -> Experiment:
        """Return a copy with some settings replaced. The new settings are checked.

        Args:
            sections: The new values. A dict changes only the settings that it contains. If the dict has a different
                ``name``, it replaces the whole section.

        Raises:
            SpecError: A key is unknown or a value is wrong.

        >>> spec = Experiment(training={"rounds": 50, "lr": 0.05})
        >>> other = spec.replace(seed=1, method="scaffold", training={"rounds": 3})
        >>> other.seed, other.method.name, other.training.rounds, other.training.lr
        (1, 'scaffold', 3, 0.05)
        """
        before = self.to_spec()
        changed = {
            key: deep_merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
            for key, value in sections.items()
            for old in [before.get(key, {})]
        }
        return build(Experiment, {**dict(self), **changed})

    def to_toml(self) -> str:
        """Return the spec as TOML. ``from_toml`` creates an equal experiment from a file with this text.

        Raises:
            SpecError: Tables or lists are nested too deeply.
        """
        try:
            return tomli_w.dumps(self.to_spec())
        except RecursionError:
            raise SpecError("spec", "tables or lists are nested too deeply. Use fewer levels.") from None


def read_table(path: Path | str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a spec file as nested dicts, and apply overrides.

    If the section ``partition`` or ``availability`` contains the key ``file``, the function first looks for this file
    in the spec's folder.

    Args:
        path: The spec file; None to start from an empty spec.
        overrides: Strings of the form ``section.key=value``.

    Raises:
        SpecError: The file is missing or is not TOML, or an override does not contain ``=``.
    """
    table = {} if path is None else read_toml(Path(path), "spec")
    compared = table.get(COMPARE)
    for sections in (table, *(compared.values() if isinstance(compared, dict) else ())):
        for key in ("partition", "availability") if isinstance(sections, dict) else ():
            given = sections.get(key)
            for section in given if isinstance(given, list) else [given]:
                _prefer_file_in(Path(path or "").parent, section)
    for override in overrides:
        apply_override(table, override)
    return table


def _prefer_file_in(folder: Path, section: Any) -> None:
    """If ``folder`` contains the ``file`` of a section, replace the file's name with its path in ``folder``."""
    if isinstance(section, dict) and isinstance(file := section.get("file"), str):
        with suppress(OSError):  # is_file raises this error if the name is too long
            if (local := folder / file).is_file():
                section["file"] = str(local)


def read_toml(path: Path, key: str) -> dict[str, Any]:
    """Read a TOML file as nested dicts.

    Args:
        path: The file.
        key: The key for error messages, such as ``spec``.

    Raises:
        SpecError: The file is missing, cannot be read or is not valid TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise SpecError(key, "the file does not exist. Give the path of a TOML file.", str(path)) from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise SpecError(key, f"cannot be read ({problem}). Give the path of a TOML file.", str(path)) from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise SpecError(key, f"is not valid TOML: {error}. Correct the file.", str(path)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text to nested dicts.

    Raises:
        ValueError: The text is not TOML, is nested too deeply, or contains a number with thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python limits the number of digits of an integer, but Python's message does not help users
        raise ValueError("an integer has too many digits") from None
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply") from None


def with_location(error: SpecError, path: Path | str) -> SpecError:
    """Return a copy of an error, with the spec file's path and the key's line added.

    If the file does not contain the key, return the error unchanged.
    """
    line = line_of(Path(path).read_text(encoding="utf-8-sig"), error.key)
    return SpecError(error.key, error.problem, error.value, f"{path}, line {line}") if line else error


def apply_override(table: dict[str, Any], override: str) -> None:
    """Apply an override ``section.key=value`` to nested dicts.

    Raises:
        SpecError: The override does not contain ``=``, or the key continues after a value, as in ``seed.x=1``.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise SpecError(
            "--set", "must have the form section.key=value. Use, for example, --set training.lr=0.1.", override
        )
    set_key(table, key.strip(), parse_value(text), override)


def parse_value(text: str) -> Any:
    """Parse a TOML value. Text that is not valid TOML, such as a word without quotes, is returned as a string.

    >>> parse_value("0.1"), parse_value("fedavg")
    (0.1, 'fedavg')
    """
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def split_values(text: str) -> list[str]:
    """Split a string at commas, except at commas in brackets and in quotes.

    >>> split_values("[200, 100],[50],'a,b'")
    ['[200, 100]', '[50]', "'a,b'"]
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def set_key(table: dict[str, Any], key: str, value: Any, given: object) -> None:
    """Set a dotted key in nested dicts.

    Args:
        table: The nested dicts, which this function changes.
        key: The key, such as ``training.lr``.
        value: The value.
        given: The text that error messages quote, such as the whole override.

    Raises:
        SpecError: A part of the key is empty, or the key continues after a value, as in ``seed.x``.
    """
    parts = key.split(".")
    if not all(parts):
        raise SpecError(
            "--set", "must have the form section.key=value. Use, for example, --set training.lr=0.1.", given
        )
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str):
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise SpecError(
                "--set", f"{part} is a value, not a section. Check the key with 'fedstrata explain'.", given
            )
        table = inner
    table.pop(EXCLUSIVE.get(parts[-1], ""), None)
    table[parts[-1]] = value


def line_of(text: str, key: str) -> int | None:
    r"""Return the line number of a dotted key in TOML text, counted from 1.

    If the text does not contain the key, return the line of the innermost existing section of the key. If none of the
    key's sections exists, return None. The tables of a list, ``[[section]]``, have keys ``section.0``, ``section.1`` …

    >>> line_of("seed = 1\n[partition]\nalpha = 0", "partition.alpha")
    3
    """
    wanted = key.split(".")
    best: tuple[int, int] | None = None
    section: list[str] = []
    tables = Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if header := re.match(r"\[(\[?)\s*([^\]]+?)\s*\]\]?", stripped):
            section = [part.strip().strip("\"'") for part in header[2].split(".")]
            paths = [section]
            if header[1]:
                section = [*section, str(tables[header[2]])]
                tables[header[2]] += 1
                paths.append(section)
        elif assignment := re.match(r"([\w.\"'-]+)\s*=", stripped):
            paths = [section + [part.strip("\"'") for part in assignment[1].split(".")]]
        else:
            continue
        for path in paths:
            if path == wanted[: len(path)] and (best is None or len(path) > best[0]):
                best = (len(path), number)
    return best[1] if best else None


def variants(
    table: Mapping[str, Any], labels: Sequence[str] | None = None, overrides: Sequence[str] = ()
) -> dict[str, Experiment]:
    """Return the experiments of a comparison, as a mapping from each label to its experiment.

    A label is a method's name, or LABEL in a table ``[compare.LABEL]``. The sections of this table are merged into the
    spec. The table's key ``method.name`` selects the method; without this key, the label is the method's name. If no
    method has this name, the spec's method is used.

    Args:
        table: The spec as nested dicts.
        labels: The labels to compare. Default: all labels of ``[compare]``.
        overrides: Strings ``section.key=value``, which take precedence over the spec and the tables of the labels. If
            only some methods have a setting, an override of this setting applies only to these methods.

    Raises:
        SpecError: A label is unknown, a setting is wrong, or an override sets a key that no method has.
    """
    of_labels = [override for override in overrides if override.strip().startswith(f"{COMPARE}.")]
    tables = copy.deepcopy(dict(table))
    for override in of_labels:
        apply_override(tables, override)
    overlays: Mapping[str, Any] = tables.get(COMPARE, {})
    if not isinstance(overlays, Mapping):
        raise SpecError(COMPARE, "must be a table. Write a table [compare.LABEL] for each experiment.", overlays)
    chosen = list(labels) if labels else list(overlays)
    if not chosen:
        problem = "is required, because the spec does not contain tables [compare.LABEL]"
        raise SpecError("--methods", f"{problem}. Use one or more of: {', '.join(METHODS)}.")
    merged = {label: _merged(tables, overlays, label) for label in chosen}
    for override in (override for override in overrides if override not in of_labels):
        accepting = [sections for sections in merged.values() if _accepts(sections, tables, override)]
        if not accepting:
            raise SpecError(
                "--set",
                f"none of the methods ({', '.join(merged)}) has this setting. Check the key with 'fedstrata explain'.",
                override,
            )
        # For later overrides, _accepts compares the names in an experiment's sections, such as data.name, with the
        # names in ``tables``. This override may set such a name, so apply it to ``tables`` too.
        for sections in (*accepting, tables):
            apply_override(sections, override)
    result: dict[str, Experiment] = {}
    for label, sections in merged.items():
        try:
            # Labels become names of folders, in which some systems do not allow the colon of "my_module:MyMethod".
            result[label.replace(":", ".")] = Experiment.from_table(sections)
        except SpecError as error:
            key = f"{COMPARE}.{label}.{error.key}" if label in overlays else error.key
            raise SpecError(key, error.problem, error.value) from None
    return result


def _merged(table: Mapping[str, Any], overlays: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Merge the spec with the table of one label; see ``variants``."""
    base = {key: value for key, value in table.items() if key != COMPARE}
    overlay = overlays.get(label, {})
    if not isinstance(overlay, Mapping):
        raise SpecError(
            f"{COMPARE}.{label}", "must be a table of sections. Write, for example, [compare.LABEL.method].", overlay
        )
    own, common = (
        {"name": method} if isinstance(method, str) else method
        for method in (overlay.get("method", {}), base.get("method", {}))
    )
    if not isinstance(own, Mapping):
        raise SpecError(f"{COMPARE}.{label}.method", "must be the name of a method, or a table of settings.", own)
    common = common if isinstance(common, Mapping) else {}
    is_method = label in METHODS or label not in overlays
    name = own.get("name", label if is_method else common.get("name", label))
    if not isinstance(name, str):
        raise SpecError(f"{COMPARE}.{label}.method.name", "must be the name of a method.", name)
    if ":" not in name and name not in METHODS:
        if label in overlays:
            problem = f"is not set. Set 'name' in [compare.{label}.method] or in [method]."
            raise SpecError(f"{COMPARE}.{label}.method.name", problem)
        problem = not_among("is not a known method or label", label, [*METHODS, *overlays], "Use one or more of")
        raise SpecError("--methods", problem, label)
    # The settings in the spec's [method] apply only to the method that is named there.
    common = common if common.get("name", "fedavg") == name else {}
    merged = deep_merge(base, {key: value for key, value in overlay.items() if key != "method"})
    merged["method"] = {**common, **own, "name": name}
    return merged


def _accepts(merged: Mapping[str, Any], base: Mapping[str, Any], override: str) -> bool:
    """Return True if an override applies to an experiment.

    An override of ``method`` applies if the experiment's method has the key. In other sections, an override that sets
    ``name`` always applies. Others apply if the experiment and the spec have the same ``name`` in the section.

    Args:
        merged: The merged spec of the experiment, as nested dicts.
        base: The original spec, as nested dicts.
        override: The string ``section.key=value``.
    """
    section, _, key = override.partition("=")[0].strip().partition(".")
    if section == "method":
        return key.partition(".")[0] in METHODS.find(merged["method"]["name"]).model_fields
    kinds = [
        part.get("name") if isinstance(part, Mapping) else part for part in (merged.get(section), base.get(section))
    ]
    return key in ("", "name") or kinds[0] == kinds[1]


def deep_merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the nested dicts ``base``, in which values from ``overlay`` replace values from ``base``.

    If the ``name`` of an inner dict differs, the dict in ``overlay`` replaces the whole dict in ``base``.
    """
    result = {key: value for key, value in base.items() if EXCLUSIVE.get(key) not in overlay}
    for key, value in overlay.items():
        inner = result.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = deep_merge(inner if value.get("name", inner.get("name")) == inner.get("name") else {}, value)
        result[key] = value
    return result
