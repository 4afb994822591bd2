"""A module as a function of its parameters: one objective runs in a plain loop, in a vmap and remotely."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedstrata.base.errors import SpecError

Params = dict[str, Tensor]
"""Tensors by their dotted name in the module."""


class Model:
    """A module as a pure function of its parameters.

    ``model(params, x)`` gives the logits that the module computes with ``params``, and leaves the module as
    it was. It may be differentiated and vectorised with ``torch.func``. For training in a plain loop,
    ``loaded`` installs the parameters in the module for a while, and calls with what it yields cost no more
    than calling the module.

    Outside ``loaded`` the module holds its initial values and is in evaluation mode. A model serves one
    thread at a time; another thread takes a ``clone``.

    **Your own module.** Any ``nn.Module`` that maps a batch (B, …) to logits (B, classes) will do. Its *head*
    is the submodule that turns features into logits, and its *features* are whatever that submodule is called
    with. The head is the submodule ``head`` if there is one, else the last ``nn.Linear``; otherwise name it
    here. ``forward`` must call the head as a module, ``self.fc(z)`` rather than ``F.linear(z,
    self.fc.weight)``. Parameters that do not require gradients count as buffers: they travel and are saved,
    and nobody trains them.

    Args:
        module: The module; it belongs to the model from now on.
        head: Dotted name of the classifier, ``"classifier.2"``; the empty string is the module itself.

    Raises:
        SpecError: No head could be found, or there is nothing to train.

    >>> model = Model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> sorted(model.head_names)
    ['2.bias', '2.weight']
    >>> model(model.params(), torch.ones(5, 2)).shape
    torch.Size([5, 2])
    """

    def __init__(self, module: nn.Module, head: str | None = None) -> None:
        self.module = module.eval()
        self.head_name = _find_head(module) if head is None else head
        modules = dict(module.named_modules(remove_duplicate=False))
        if self.head_name not in modules:
            raise SpecError("model.head", "no submodule of that name; there are: " + ", ".join(modules), head)
        self._head = modules[self.head_name]
        self._installed: Params | None = None
        self._shared: Params = {}
        self._collect()
        # By identity, not by prefix: a head that is reachable under two names has its parameters under the
        # first.
        names = {id(tensor): name for name, tensor in self._leaves.items()}
        local = {name: names.get(id(tensor)) for name, tensor in self._head.named_parameters()}
        self._head_params = {name: full for name, full in local.items() if full is not None}
        self.head_names = frozenset(self._head_params.values())
        """Names of the parameters under the head."""

    def _collect(self) -> None:
        persistent = self.module.state_dict().keys()
        named = dict(self.module.named_parameters())
        self._leaves: Params = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        if not self._leaves:
            raise SpecError("model", f"{type(self.module).__name__} has no parameter that requires gradients")
        self._changing = dict(self.module.named_buffers())
        self._places = [
            (part, own, buffer)
            for part in self.module.modules()
            for own, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._others: Params = {name: tensor for name, tensor in named.items() if name not in self._leaves}
        self._others |= {name: tensor for name, tensor in self._changing.items() if name in persistent}
        self._initial_params, self._initial_buffers = _copies(self._leaves), _copies(self._others)
        self._tied = _tied(self.module)

    def params(self) -> Params:
        """Clones of the initial parameters, in the order in which the module registered them."""
        return _copies(self._initial_params)

    def laid_out(self, values: Mapping[str, Tensor]) -> Params:
        """Clones of given values in the memory format in which the module is fast; a wire or a file loses it.

        Args:
            values: Parameters or buffers by name, of the module's shapes; from any device to the module's own.
        """
        own = {**self._initial_params, **self._initial_buffers}
        laid_out = {name: torch.empty_like(own[name]) for name in values}
        _copy_into(laid_out, values)
        return laid_out

    def buffers(self) -> Params:
        """Clones of the initial buffers (running statistics, frozen parameters), in the same order."""
        return _copies(self._initial_buffers)

    def current_buffers(self) -> Params:
        """Clones of the buffers as training has left them.

        Raises:
            RuntimeError: Nothing is loaded.
        """
        if self._installed is None:
            raise RuntimeError("current_buffers() is for use inside 'with model.loaded(...)'")
        self._gather_rebound()
        return _copies(self._others)

    def _gather_rebound(self) -> None:
        """Bring the values of buffers that a forward pass bound to other tensors back into the module's own."""
        for part, own, buffer in self._places:
            current = part._buffers.get(own)
            if current is not buffer:
                if current is None or current.shape != buffer.shape:
                    shape = None if current is None else tuple(current.shape)
                    raise SpecError("model", f"training made buffer {own!r} {shape}, it was {tuple(buffer.shape)}")
                with torch.no_grad():
                    buffer.copy_(current)
                part._buffers[own] = buffer

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits.

        Args:
            params: What ``loaded`` yielded, or any tensors by name. What is not named among them (buffers as
                a rule) is taken from the module as it stands, and not changed there.
            x: A batch, (B, …).

        Returns:
            Logits, (B, classes).
        """
        logits: Tensor
        if params is self._installed:
            logits = self.module(x)
            return logits
        if self._changing and self.module.training:
            # BatchNorm updates its running statistics in place: those of copies, or the call would not be
            # pure.
            params = {**_copies(self._changing), **params}
        tied = {other: params[name] for name, others in self._tied.items() if name in params for other in others}
        # Every tensor by each of its places, once: what PyTorch does itself about ties forgets that a whole submodule
        # may have two names, and leaves a foreign tensor there.
        logits = functional_call(self.module, {**params, **tied}, (x,), tie_weights=False)
        return logits

    def with_features(self, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits in one pass.

        Returns:
            The input of the head, (B, features) as a rule, and the logits, (B, classes).

        Raises:
            RuntimeError: ``forward`` did not call the head.
        """
        seen: list[Tensor] = []

        def catch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])

        handle = self._head.register_forward_pre_hook(catch)
        try:
            logits = self(params, x)
        finally:
            handle.remove()
        if not seen:
            raise RuntimeError(f"forward never called the head {self.head_name!r}; name another: Model(module, head=…)")
        return seen[-1], logits

    def head(self, params: Params, features: Tensor) -> Tensor:
        """The logits of given features: only the head is computed."""
        logits: Tensor
        if params is self._installed:
            logits = self._head(features)
            return logits
        own = {name: params[full] for name, full in self._head_params.items() if full in params}
        logits = functional_call(self._head, own, (features,))
        return logits

    @contextmanager
    def loaded(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None, train: bool = False
    ) -> Iterator[Params]:
        """Install copies of ``params`` and ``buffers`` in the module for the block.

        An in-place change (under ``no_grad``) of a tensor in the yielded dictionary changes the module. Clone
        what is to outlive the block: after it the module holds its initial values again, and the dictionary
        is empty.

        Args:
            params: All parameters by name.
            buffers: Buffers by name; those left out have their initial values.
            train: Whether the module is in training mode in the block.

        Yields:
            The module's own parameters: leaf tensors that require gradients.

        Raises:
            RuntimeError: Something is loaded already; take a ``clone``.
            ValueError: A name is missing or unknown, or a shape differs.
        """
        if self._installed is not None:
            raise RuntimeError("this model is loaded already; a model serves one user at a time: take a clone()")
        buffers = {} if buffers is None else buffers
        if missing := self._leaves.keys() - params.keys():
            raise ValueError(f"parameters missing: {', '.join(sorted(missing))}")
        _check(params, self._leaves, "parameter")
        _check(buffers, self._others, "buffer")
        training = self.module.training
        self._gather_rebound()
        installed = self._installed = dict(self._leaves)
        try:
            _copy_into(self._leaves, params)
            _copy_into(self._others, buffers)
            self.train_mode(train)
            yield installed
        finally:
            self._installed = None
            installed.clear()
            self._gather_rebound()
            self._part()
            _copy_into(self._leaves, self._initial_params)
            _copy_into(self._others, self._initial_buffers)
            for leaf in self._leaves.values():
                leaf.grad = None
            self.train_mode(training)

    def load_for_good(self, train: bool = False) -> Params:
        """Like ``loaded``, for a model that stays loaded: nobody else may use it; ``share`` changes it.

        Raises:
            RuntimeError: Something is loaded already.
        """
        self._refuse_loaded("loaded")
        self._installed = dict(self._leaves)
        self.train_mode(train)
        return self._installed

    def share(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Let a loaded module read other parameters where they lie; buffers are copied. Names and shapes are trusted.

        For passes that read the parameters: until the next load, nobody may change them, neither here nor there.

        Raises:
            RuntimeError: Nothing is loaded.
        """
        if self._installed is None:
            raise RuntimeError("share() is for use inside 'with model.loaded(...)'")
        self._gather_rebound()
        for name, leaf in self._leaves.items():
            given, own = params[name], self._initial_params[name]
            if given is self._shared.get(name):
                continue
            if given.stride() == own.stride() and given.dtype == own.dtype:
                leaf.data = self._shared[name] = given
            else:
                # What came over a wire or from a file may have lost the layout in which the module is fast.
                self._shared.pop(name, None)
                leaf.data = torch.empty_like(own).copy_(given)
        _copy_into(self._others, buffers or {})

    def _part(self) -> None:
        """Give parameters that were shared memory of the module's own again."""
        for name in self._shared:
            self._leaves[name].data = torch.empty_like(self._initial_params[name])
        self._shared.clear()

    def train_mode(self, on: bool) -> None:
        """Put the module in training mode or in evaluation mode."""
        if self.module.training != on:
            self.module.train(on)

    def to(self, device: torch.device | str) -> Model:
        """Move the module, with its initial values, to ``device``; returns the model itself.

        Raises:
            RuntimeError: The model is loaded.
        """
        self._refuse_loaded("moved")
        self.module.to(device)
        self._collect()
        return self

    def clone(self) -> Model:
        """An independent model with the same initial values, for another thread.

        Raises:
            RuntimeError: The model is loaded.
        """
        self._refuse_loaded("cloned")
        twin = Model(copy.deepcopy(self.module), self.head_name)
        twin.train_mode(self.module.training)
        return twin

    def _refuse_loaded(self, verb: str) -> None:
        if self._installed is not None:
            raise RuntimeError(f"a model cannot be {verb} while it is loaded")


def _find_head(module: nn.Module) -> str:
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head"
    linear: list[str] = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        problem = (
            f"{type(module).__name__} has neither a submodule 'head' nor an nn.Linear: "
            "call its classifier 'head', or name it: Model(module, head='dotted.name')"
        )
        raise SpecError("model.head", problem)
    return linear[-1]


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """The other places of tensors that several submodules share, by the name of the first."""
    places: dict[int, list[str]] = {}
    for prefix, part in module.named_modules():
        for own, tensor in itertools.chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            places.setdefault(id(tensor), []).append(f"{prefix}.{own}" if prefix else own)
    return {names[0]: names[1:] for names in places.values() if len(names) > 1}


def _copies(tensors: Mapping[str, Tensor]) -> Params:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _check(given: Mapping[str, Tensor], own: Params, kind: str) -> None:
    for name, tensor in given.items():
        if name not in own:
            raise ValueError(f"no {kind} {name!r} in this model; there are: {', '.join(own) or 'none'}")
        # copy_ would broadcast without a word.
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)}, and {tuple(own[name].shape)} is needed"
            raise ValueError(f"{kind} {name!r} has shape {shapes}")


def _copy_into(own: Params, given: Mapping[str, Tensor]) -> None:
    if given:
        with torch.no_grad():
            torch._foreach_copy_([own[name] for name in given], list(given.values()))
