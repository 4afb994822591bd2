"""Import the objects that are written as ``"module:Class"`` in a spec, and limit what may be imported."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedstrata.base.errors import FedstrataError, SpecError

_ALLOWED: ContextVar[tuple[frozenset[str], str] | None] = ContextVar("allowed", default=None)
"""The packages that may be imported (None: any package), and the error message for other packages."""


@contextmanager
def only_from(packages: Collection[str] | None, advice: str = "") -> Iterator[None]:
    """Limit the packages from which ``load_object`` may import in this thread, during the ``with`` block.

    A site uses this limit when it reads specs that another party wrote.

    Args:
        packages: The allowed top-level packages. The value None allows any package.
        advice: The error message for packages that are not allowed. By default, the message lists the allowed packages.
    """
    before = _ALLOWED.set(None if packages is None else (frozenset(packages), advice))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def load_object(path: str, kind: str) -> Any:
    """Return the object at ``"module:attribute"``, if ``only_from`` allows it.

    Raises:
        SpecError: The module or the attribute does not exist, or ``only_from`` forbids its package.
    """
    packages, advice = _ALLOWED.get() or (None, "")
    if packages is not None and path.partition(":")[0].partition(".")[0] not in packages:
        accepted = f"contains only {', '.join(sorted(packages))}" if packages else "is empty"
        by_list = (
            f"is not in a package that this party allows. The party's list 'allow' {accepted}. Add the package to "
            "this list."
        )
        raise SpecError("name", advice or by_list, path)
    return import_object(path, kind)


def import_object(path: str, kind: str) -> Any:
    """Return the object at ``"module:attribute"``, even if ``only_from`` forbids its package.

    Raises:
        SpecError: The module or the attribute does not exist, or the module fails when it is imported.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise SpecError("name", f"is not a valid import path of the {kind}. Use the form 'module:Class'.", path)
    try:
        module = importlib.import_module(module_name)
    except FedstrataError:
        raise
    except (Exception, SystemExit) as error:  # a user's own module may raise any exception
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise SpecError(
                "name",
                f"the module {module_name!r} was not found. Check the name and the working directory.",
                path,
            ) from None
        missing = (
            f"Install {error.name!r}" if isinstance(error, ModuleNotFoundError) and error.name else "Correct the module"
        )
        problem = f"importing the module fails with {type(error).__name__}: {error}. {missing}."
        raise SpecError("name", problem, path) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise SpecError(
            "name", f"the module {module_name!r} does not define {attribute!r}. Check the name.", path
        ) from None
