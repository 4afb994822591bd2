"""Test a model on a few samples before a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import Inputs, each
from fedstrata.models.model import Model


def draws_random_numbers(model: Model, x: Inputs) -> bool:
    """Run a forward pass in training mode, and return True if it draws random numbers, as a dropout layer does.

    The pass also shows which buffers are constant; see ``Model.keep_constant``.

    Args:
        model: The model. Its parameters and buffers do not change.
        x: Some samples. If there is only one, it is repeated. If there are none, two samples of zeros are used.

    Raises:
        SpecError: The forward pass fails, or changes a frozen parameter.
    """
    x = each(x, _two)
    before, draws = torch.get_rng_state(), _Draws()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), model.loaded(model.params(), model.buffers(), train=True) as params:
            versions, sums = model.untrained.versions(), model.untrained.sums()
            with draws:
                model(params, x)
            if model.untrained.sent:  # also find buffers that change only in evaluation mode
                model.module.eval()
                model(params, x)
            changed = model.untrained.changed(versions) | dict(sums.items() ^ model.untrained.sums().items()).keys()
            model.untrained.refuse(changed)
            constant = model.untrained.sent.keys() - changed
    except SpecError:
        raise
    except Exception as error:  # the user's own module may raise any exception
        shapes = tuple(x.shape) if isinstance(x, Tensor) else {name: tuple(part.shape) for name, part in x.items()}
        problem = f"fails in training mode on a batch of shape {shapes}: {type(error).__name__}: {error}"
        raise SpecError("model", problem, type(model.module).__name__) from error
    finally:
        torch.set_rng_state(before)
    if constant:
        model.keep_constant(constant)
    return draws.random


def _two(x: Tensor) -> Tensor:
    return torch.cat([x, x])[:2] if len(x) else x.new_zeros(2, *x.shape[1:])


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects whether this thread runs a PyTorch operation that draws random numbers.

    A comparison of generator states would also detect random numbers of other threads, because all threads share the
    generator.
    """

    random = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not import its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [argument.name for argument in func._schema.arguments]
            # PyTorch does not pass arguments that have their default value.
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Attention operations always have this tag, but draw random numbers only for dropout, whose default is 0.
            self.random |= "dropout_p" not in names or given.get("dropout_p", 0.0) > 0
        return func(*args, **kwargs)
