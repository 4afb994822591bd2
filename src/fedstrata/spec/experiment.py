"""The specification of an experiment, in Python and as TOML."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field

from fedstrata.base.config import Setting, build, from_word
from fedstrata.base.errors import SpecError, nearest
from fedstrata.data.partitions.base import AnyPartition
from fedstrata.data.partitions.schemes import Dirichlet
from fedstrata.data.sources import Data
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.availability import Always, AnyAvailability
from fedstrata.federation.communication.codecs import Communication
from fedstrata.federation.settings import Privacy, Training
from fedstrata.methods.base import METHODS, AnyMethod
from fedstrata.methods.fedavg import FedAvg
from fedstrata.models.zoo import MLP, AnyModel
from fedstrata.spec.callbacks import AnyCallback
from fedstrata.spec.tracking import Tracking

COMPARE = "compare"
"""The section of a spec file with what differs between the methods that ``fedstrata compare`` runs."""

EXCLUSIVE = {
    "local_epochs": "local_steps",
    "local_steps": "local_epochs",
    "indices": "file",
    "file": "indices",
}
"""Keys that exclude each other: what is given on top replaces the other one."""

LARGEST_SEED = 2**128 - 1
"""As many bits as randomness is made from."""


class Experiment(Setting):
    """Everything that decides a result.

    Args:
        seed: Of all randomness.
        data: Which data set.
        partition: Which samples belong to whom.
        availability: Who answers, and how fast.
        method: The federated method.
        model: The architecture.
        training: How clients train.
        evaluation: When the result is evaluated and stored.
        communication: How models and updates travel.
        privacy: The fewest samples behind anything that a client sends.
        callbacks: What looks at the run and may end it, such as ``["early-stopping"]``.
        tracking: Where else the run is shown while it goes on; it decides nothing.

    >>> spec = Experiment(method="scaffold", training={"rounds": 3})
    >>> spec.method.name, spec.training.rounds, spec.data.name
    ('scaffold', 3, 'digits')
    """

    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    data: Annotated[Data, from_word(Data, "name")] = Data()
    partition: AnyPartition = Dirichlet(alpha=0.5)
    availability: AnyAvailability = Always()
    method: AnyMethod = FedAvg()
    model: AnyModel = MLP()
    training: Training = Training()
    evaluation: Annotated[Evaluation, from_word(Evaluation)] = Evaluation()
    communication: Annotated[Communication, from_word(Communication)] = Communication()
    privacy: Annotated[Privacy, from_word(Privacy)] = Privacy()
    callbacks: list[AnyCallback] = []
    tracking: Annotated[Tracking, from_word(Tracking)] = Tracking()

    def to_spec(self) -> dict[str, Any]:
        """As nested tables; newer sections that change nothing are left out."""
        table = super().to_spec()
        silent = {
            "communication": self.communication.plain,
            "privacy": self.privacy == Privacy(),
            "callbacks": not self.callbacks,
            "tracking": not self.tracking.callbacks,
        }
        return {key: value for key, value in table.items() if not silent.get(key)}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Experiment:
        """From nested tables, as TOML gives them.

        Raises:
            SpecError: A key is unknown or a value is wrong.
        """
        return build(cls, {key: value for key, value in table.items() if key != COMPARE})

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
        """From a file, with ``section.key=value`` overrides.

        Raises:
            SpecError: The file is missing or no TOML, a key is unknown or a value is wrong; the
                message names the line.
        """
        table = read_table(path, overrides)
        try:
            return cls.from_table(table)
        except SpecError as error:
            raise placed(error, path) from None

    def to_toml(self) -> str:
        """As TOML; reading it back gives an equal experiment.

        Raises:
            SpecError: An argument of the user's own model or method is nested too deeply.
        """
        try:
            return tomli_w.dumps(self.to_spec())
        except RecursionError:
            raise SpecError("spec", "nested too deeply") from None


def read_table(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a spec file, with overrides applied.

    The file of a partition is looked for beside the spec first, where a run folder has its own.

    Raises:
        SpecError: The file is missing or no TOML, or an override has no ``=``.
    """
    table = read_toml(Path(path), "spec")
    compared = table.get(COMPARE)
    for each in (table, *(compared.values() if isinstance(compared, dict) else ())):
        partition = each.get("partition") if isinstance(each, dict) else None
        if isinstance(partition, dict) and isinstance(file := partition.get("file"), str):
            with suppress(OSError):  # longer than a file's name can be
                if (beside := Path(path).parent / file).is_file():
                    partition["file"] = str(beside)
    for override in overrides:
        apply_override(table, override)
    return table


def read_toml(path: Path, key: str) -> dict[str, Any]:
    """The tables of a TOML file; errors name ``key``.

    Raises:
        SpecError: The file is missing, cannot be read or is no TOML.
    """
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(key, "no such file", str(path)) from None
    except (OSError, ValueError) as error:
        raise SpecError(key, f"cannot be read as TOML: {error}", str(path)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text.

    Raises:
        ValueError: It is no TOML, is nested too deeply, or holds a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit, with advice that is not for whoever wrote the spec
        raise ValueError("a whole number has thousands of digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def placed(error: SpecError, path: Path | str) -> SpecError:
    """The same error with the file and line of its key, where the file has it."""
    line = line_of(Path(path).read_text(encoding="utf-8"), error.key)
    where = f" ({path}, line {line})" if line else ""
    return SpecError(error.key, error.problem + where, error.value)


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one ``section.key=value`` in nested tables.

    Raises:
        SpecError: There is no ``=``, or a part of the key is a value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise SpecError("--set", "expected section.key=value", override)
    set_key(table, key.strip(), parse_value(text), override)


def parse_value(text: str) -> Any:
    """A value as TOML writes it; a word needs no quotes.

    >>> parse_value("0.1"), parse_value("fedavg")
    (0.1, 'fedavg')
    """
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def split_values(text: str) -> list[str]:
    """What stands between commas, but for those in brackets and in quotes.

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
    """Set a dotted key in nested tables; errors show what was ``given``.

    Raises:
        SpecError: It is no key, or a part of it is a value.
    """
    parts = key.split(".")
    if not all(parts):
        raise SpecError("--set", "expected section.key=value", given)
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str):
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise SpecError("--set", f"{part} is a value, not a section", given)
        table = inner
    table.pop(EXCLUSIVE.get(parts[-1], ""), None)
    table[parts[-1]] = value


def line_of(text: str, key: str) -> int | None:
    r"""The line, counted from 1, in which a dotted key (or the innermost part of it that is there) stands.

    >>> line_of("seed = 1\n[partition]\nalpha = 0", "partition.alpha")
    3
    """
    wanted = key.split(".")
    best: tuple[int, int] | None = None
    section: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if header := re.match(r"\[\[?\s*([^\]]+?)\s*\]\]?", stripped):
            section = [part.strip().strip("\"'") for part in header[1].split(".")]
            path = section
        elif assignment := re.match(r"([\w.\"'-]+)\s*=", stripped):
            path = section + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        if path == wanted[: len(path)] and (best is None or len(path) > best[0]):
            best = (len(path), number)
    return best[1] if best else None


def variants(
    table: Mapping[str, Any], labels: Sequence[str] | None = None, overrides: Sequence[str] = ()
) -> dict[str, Experiment]:
    """The experiments that a spec compares, by label.

    A label is a method's name, or a table ``[compare.LABEL]`` whose sections are laid over the spec's. Its method is
    its own ``method.name``, else the method that is called like the label, else the spec's.

    Args:
        table: The spec's tables.
        labels: Which; all of ``[compare]`` unless given.
        overrides: ``section.key=value``, which win over the spec and the labels' tables. What only some of the
            methods have is set for those.

    Raises:
        SpecError: A label is neither, a setting is wrong, or an override means nothing to any of the methods.
    """
    about_labels = [override for override in overrides if override.strip().startswith(f"{COMPARE}.")]
    tables = copy.deepcopy(dict(table))
    for override in about_labels:
        apply_override(tables, override)
    overlays: Mapping[str, Any] = tables.get(COMPARE, {})
    if not isinstance(overlays, Mapping):
        raise SpecError(COMPARE, "expected tables [compare.LABEL]", overlays)
    chosen = list(labels) if labels else list(overlays)
    if not chosen:
        raise SpecError("--methods", f"which? Any of {', '.join(METHODS)}, or tables [compare.LABEL] of the spec")
    merged = {label: _merged(tables, overlays, label) for label in chosen}
    for override in (override for override in overrides if override not in about_labels):
        takers = [each for each in merged.values() if _takes(each, tables, override)]
        if not takers:
            raise SpecError("--set", f"none of these methods has that setting: {', '.join(merged)}", override)
        # The spec's own too: what comes after is a setting of the kind that this one may have named.
        for each in (*takers, tables):
            apply_override(each, override)
    result: dict[str, Experiment] = {}
    for label, each in merged.items():
        try:
            result[label] = Experiment.from_table(each)
        except SpecError as error:
            key = f"{COMPARE}.{label}.{error.key}" if label in overlays else error.key
            raise SpecError(key, error.problem, error.value) from None
    return result


def _merged(table: Mapping[str, Any], overlays: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The tables of one label's experiment."""
    base = {key: value for key, value in table.items() if key != COMPARE}
    overlay = overlays.get(label, {})
    if not isinstance(overlay, Mapping):
        raise SpecError(f"{COMPARE}.{label}", "expected a table of sections, such as [compare.LABEL.method]", overlay)
    own = overlay.get("method", {})
    own = {"name": own} if isinstance(own, str) else own
    if not isinstance(own, Mapping):
        raise SpecError(f"{COMPARE}.{label}.method", "expected a name or a table", own)
    common = base.get("method", {})
    common = {"name": common} if isinstance(common, str) else common
    common = common if isinstance(common, Mapping) else {}
    known = label in METHODS or label not in overlays
    name = own.get("name", label if known else common.get("name", label))
    if not isinstance(name, str):
        raise SpecError(f"{COMPARE}.{label}.method.name", "expected a name", name)
    if ":" not in name and name not in METHODS:
        accepted = [*METHODS, *(other for other in overlays if other != label)]
        if label in overlays:
            problem = f"which method? [compare.{label}] needs a method.name, or the spec one that it inherits"
            raise SpecError(f"{COMPARE}.{label}.method.name", problem)
        problem = f"no such method or label{nearest(label, accepted)}; there are: {', '.join(accepted)}"
        raise SpecError("--methods", problem, label)
    # A method's settings mean nothing to another method: only those of the same method are inherited.
    common = common if common.get("name", "fedavg") == name else {}
    merged = _over(base, {key: value for key, value in overlay.items() if key != "method"})
    merged["method"] = {**common, **own, "name": name}
    return merged


def _takes(merged: Mapping[str, Any], base: Mapping[str, Any], override: str) -> bool:
    """Whether an override means anything to an experiment: another kind, such as another method, has other keys."""
    section, _, key = override.partition("=")[0].strip().partition(".")
    if section == "method":
        return key.partition(".")[0] in METHODS.find(merged["method"]["name"]).model_fields
    return key in ("", "name") or _kind(merged.get(section)) == _kind(base.get(section))


def _kind(section: object) -> object:
    return section.get("name") if isinstance(section, Mapping) else section


def _over(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key in overlay:
        result.pop(EXCLUSIVE.get(key, ""), None)  # The overlay's replaces the spec's.
    for key, value in overlay.items():
        below = result.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        # Another kind (another "name") starts from nothing.
        keeps = both and value.get("name", below.get("name")) == below.get("name")  # type: ignore[union-attr]
        result[key] = _over(below, value) if keeps else value  # type: ignore[arg-type]
    return result
