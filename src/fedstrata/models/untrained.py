"""Watch the tensors of a module that are not trained: frozen parameters, and buffers (which training may change)."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedstrata.base.errors import SpecError


class Untrained:
    """The buffers and the frozen parameters of a module.

    Args:
        module: The module to watch.
        constant: The names of the buffers that are known to be constant.
    """

    def __init__(self, module: nn.Module, constant: Collection[str] = ()) -> None:
        saved, named = module.state_dict().keys(), dict(module.named_buffers())
        self.changing = {name: buffer for name, buffer in named.items() if name not in constant}
        """The buffers that may change in a training pass."""
        self.sent = {name: buffer for name, buffer in self.changing.items() if name in saved}
        """The buffers in ``changing`` that are sent and saved."""
        self.constant = {name: named[name] for name in named if name in constant}
        """The buffers that are known to be constant."""
        parameters = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
        self.frozen: dict[str, Tensor] = {**parameters, **self.constant}
        """The frozen parameters and the constant buffers, which are neither sent nor saved nor copied."""
        self.all: dict[str, Tensor] = {**parameters, **{name: named[name] for name in named if name in saved}}
        """The frozen parameters and all saved buffers, in an order that does not depend on ``constant``."""
        self.any = bool(named or parameters)
        """Whether there are buffers or frozen parameters to watch."""
        self._parameters = parameters
        names = {id(buffer): name for name, buffer in named.items()}
        self._places = [
            (part, local, buffer, names[id(buffer)])
            for part in module.modules()
            for local, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._versions: list[tuple[str, int]] = []

    def gather(self) -> None:
        """If a forward pass replaced a buffer with another tensor, copy the new values into the original tensor."""
        for part, local, buffer, name in self._places:
            current = part._buffers.get(local)
            if current is not buffer:
                if name not in self.frozen:
                    if current is None or current.shape != buffer.shape:
                        shape = None if current is None else tuple(current.shape)
                        problem = (
                            f"training changed the shape of buffer {local!r} from {tuple(buffer.shape)} to {shape}."
                        )
                        raise SpecError("model", f"{problem} Keep the shape of the buffer.")
                    with torch.no_grad():
                        buffer.copy_(current)
                part._buffers[local] = buffer

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy values into the buffers that are sent and saved."""
        self.gather()
        with torch.no_grad():
            for name, values in buffers.items():
                self.sent[name].copy_(values)

    def changed(self, before: list[tuple[str, int]]) -> set[str]:
        """Return the names of the tensors whose entries in ``versions()`` and ``before`` differ."""
        return {name for name, _ in {*before}.symmetric_difference(self.versions())}

    def versions(self) -> list[tuple[str, int]]:
        """Return the name of each tensor and its number of changes (−1 for a replaced buffer)."""
        buffers = [
            (name, buffer._version if part._buffers.get(local) is buffer else -1)
            for part, local, buffer, name in self._places
        ]
        return buffers + [(name, tensor._version) for name, tensor in self._parameters.items()]

    def sums(self) -> dict[str, str]:
        """Return each tensor's sum as a string. A change of ``tensor.data`` changes the sum, but not the version."""
        return {name: repr(tensor.detach().sum(dtype=torch.float64).item()) for name, tensor in self.all.items()}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise ``SpecError`` if the block changes a frozen tensor. ``gather`` is called before and after the block."""
        self.gather()
        self.watch()
        try:
            yield
            self.refuse_changes()
        finally:
            self.gather()

    def watch(self) -> None:
        """Start to watch the tensors in ``frozen`` for changes."""
        if self.frozen:
            self._versions = self.versions()

    def refuse_changes(self) -> None:
        """Raise ``SpecError`` if a tensor of ``frozen`` was changed or replaced since the last ``watch``."""
        if self.frozen:
            self.refuse(self.changed(self._versions))

    def refuse(self, changed: Collection[str]) -> None:
        """Raise ``SpecError`` if one of the changed tensors is frozen."""
        for name in sorted(self.frozen.keys() & changed):
            if name in self.constant:
                problem = (
                    "was constant in a test run, so clients do not send this buffer. Training then changed the buffer"
                )
                advice = "Change the buffer in every training pass, or register it with persistent=False."
            else:
                problem = "is frozen, so clients do not send it. However, a forward pass changed its value"
                advice = "Register the parameter as a buffer."
            raise SpecError("model", f"{name} {problem}. {advice}")


def twin_of(module: nn.Module, constant: Iterable[Tensor] = ()) -> nn.Module:
    """Return a copy of a module. Frozen parameters and the given buffers share their memory with the original."""
    memo: dict[int, Tensor] = {id(tensor): tensor for tensor in constant}
    for tensor in module.parameters():
        if not tensor.requires_grad:
            # Share the memory but not the parameter object, because ``Module.to`` changes parameters in place.
            memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
    return copy.deepcopy(module, memo)
