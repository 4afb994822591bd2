"""A PyTorch module as a function of its parameters, for use in plain training loops and with ``torch.func``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import Inputs
from fedstrata.models.head import Head
from fedstrata.models.untrained import Untrained, twin_of

Params = dict[str, Tensor]
"""A mapping from the dotted name of a parameter or buffer in the module to its tensor."""


class Model:
    """A PyTorch module, called as a pure function of its parameters.

    ``model(params, x)`` returns the logits that the module computes with ``params``, and does not change the module.
    The call can be differentiated and vectorised with ``torch.func``. For training in a plain loop, ``loaded`` installs
    parameters in the module during a ``with`` block. If ``params`` is the dictionary that ``loaded`` yields, calling
    the model is as fast as calling the module.

    Outside ``loaded``, the module has its initial values and is in evaluation mode. Only one thread at a time may use a
    model. Another thread must use a ``clone``.

    **Your own module.** Any ``nn.Module`` that maps a batch (B, …) to logits (B, classes) can be used. The tensors of a
    batch with several inputs are passed by name: ``module(**inputs)``. The module returns the logits, or an object with
    an attribute ``logits``, or a tuple that begins with the logits. The *head* is the submodule that computes logits
    from features, and the *features* are the input of the head. By default, the head is the submodule ``head``. Without
    this submodule, the head is the last ``nn.Linear`` that is trained and not part of a LoRA adapter. In ``forward``,
    call the head as a module: write ``self.fc(z)``, not ``F.linear(z, self.fc.weight)``. Only some methods need a head.

    Parameters that do not require gradients are *frozen*: they are neither sent nor saved. Every party creates its own
    copy of the module, and frozen parameters must be the same for all parties. Trainable parameters are float32.

    Args:
        module: The module. Do not use the module elsewhere afterwards, because the model changes the module.
        head: The dotted name of the head, such as ``"classifier.2"``. The empty string stands for the module itself.

    Raises:
        SpecError: The module has no trainable parameters, has trainable parameters that are not float32, or has no head
            of this name.

    >>> model = Model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> sorted(model.head_names)
    ['2.bias', '2.weight']
    >>> model(model.params(), torch.ones(5, 2)).shape
    torch.Size([5, 2])
    """

    def __init__(self, module: nn.Module, head: str | None = None) -> None:
        self.module = module.eval()
        self.has_batchnorm = any(isinstance(part, _BatchNorm) for part in module.modules())
        self._named_head = head
        self._installed: Params | None = None
        self._shared: Params = {}
        self._collect()
        if head is not None:
            _ = self._head

    @cached_property
    def _head(self) -> Head:
        return Head.of(self.module, self._named_head, self._leaves)

    @cached_property
    def feature_size(self) -> int:
        """The length d of a feature vector. Reading the length raises ``SpecError`` if it is unknown."""
        return self._head.feature_size()

    @property
    def head_name(self) -> str:
        """The dotted name of the head. Reading the name raises ``SpecError`` if the module has no head."""
        return self._head.name

    @property
    def head_names(self) -> frozenset[str]:
        """The names of the head's trainable parameters in the whole module."""
        return frozenset(self._head.params.values())

    def _collect(self, constant: Collection[str] = ()) -> None:
        self._leaves: Params = {name: w for name, w in self.module.named_parameters() if w.requires_grad}
        require_trainable(self.module)
        self.untrained = Untrained(self.module, constant)
        """The buffers and the frozen parameters."""
        self._initial_params, self._initial_buffers = _copies(self._leaves), _copies(self.untrained.sent)
        self._tied = _tied(self.module)

    def params(self) -> Params:
        """Return clones of the initial parameters, in the order in which the module registered them."""
        return _copies(self._initial_params)

    def laid_out(self, values: Mapping[str, Tensor]) -> Params:
        """Copy values to the module's device and memory format.

        Use this method for values from messages and files.

        Args:
            values: A mapping from names of parameters or buffers to values with the shapes that the module requires.
        """
        initial = {**self._initial_params, **self._initial_buffers}
        clones = {name: torch.empty_like(initial[name]) for name in values}
        _copy_into(clones, values)
        return clones

    def buffers(self) -> Params:
        """Return clones of the initial buffers that training changes, such as running statistics.

        Constant buffers, and buffers that are not saved (``persistent=False``), are left out.
        """
        return _copies(self._initial_buffers)

    def keep_constant(self, names: Collection[str]) -> None:
        """Treat buffers as frozen: they are neither sent nor saved, and they must not change.

        Args:
            names: The names of saved buffers. Buffers that were named in earlier calls stay frozen.
        """
        self._collect({*names, *self.untrained.constant})

    def current_buffers(self) -> Params:
        """Return clones of the buffers in their current state, which training may have changed.

        Raises:
            RuntimeError: The model is not loaded (see ``loaded``), and has buffers that training changes.
        """
        if self._installed is None and self.untrained.sent:
            raise RuntimeError("current_buffers() can be called only inside 'with model.loaded(...)'")
        if not self.untrained.any:
            return {}
        self.untrained.refuse_changes()
        self.untrained.gather()
        return _copies(self.untrained.sent)

    def __call__(self, params: Params, x: Inputs) -> Tensor:
        """Compute the logits of a batch.

        Args:
            params: The dictionary that ``loaded`` yields, or any mapping from name to tensor. Missing parameters and
                buffers are read from the module, and are not changed there.
            x: A batch: a tensor (B, …), or a mapping from the names of the module's arguments to tensors.

        Returns:
            The logits, shape (B, classes).
        """
        if params is self._installed:
            output = self.module(x) if isinstance(x, Tensor) else self.module(**x)
            return output if isinstance(output, Tensor) else unwrapped(output)
        if self.untrained.changing and self.module.training:
            # BatchNorm updates its running statistics in place. Pass copies, so that this call does not change the
            # model.
            params = {**_copies(self.untrained.changing), **params}
        tied = {other: params[name] for name, others in self._tied.items() if name in params for other in others}
        args, named = ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
        # Pass each tensor under all of its names. PyTorch's option ``tie_weights`` would do this, but would not restore
        # the original parameters of a submodule with two names after the call.
        return unwrapped(functional_call(self.module, {**params, **tied}, args, named, tie_weights=False))

    def with_features(self, params: Params, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute features and logits in one pass.

        Returns:
            The input of the head, usually (B, features), and the logits, shape (B, classes).

        Raises:
            RuntimeError: ``forward`` did not call the head.
        """
        head, inputs = self._head.module, dict[nn.Module, tuple[Tensor, ...]]()
        handle = head.register_forward_pre_hook(inputs.__setitem__)  # stores the head's arguments
        try:
            logits = self(params, x)
        finally:
            handle.remove()
        if not inputs:
            raise RuntimeError(
                f"forward did not call the head {self.head_name!r}. Give another submodule with Model(module, head=…)."
            )
        return inputs[head][0], logits

    def head(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head of the model to features.

        Args:
            params: See ``__call__``.
            features: The input of the head, usually of shape (B, features).

        Returns:
            The logits, shape (B, classes).
        """
        if params is self._installed:
            return self._head.module(features)  # type: ignore[no-any-return]
        head_params = {name: params[full] for name, full in self._head.params.items() if full in params}
        return functional_call(self._head.module, head_params, (features,))  # type: ignore[no-any-return]

    @contextmanager
    def loaded(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None, train: bool = False
    ) -> Iterator[Params]:
        """Install copies of ``params`` and ``buffers`` in the module during the ``with`` block.

        If you change tensors of the yielded dictionary in place (under ``no_grad``), the module changes too. After the
        block, the module has its initial values again, and the dictionary is empty. Clone the tensors that you need
        after the block.

        Args:
            params: A mapping from the name of every parameter to its value.
            buffers: A mapping from the names of buffers to their values. Other buffers have their initial values.
            train: Whether the module is in training mode in the block.

        Yields:
            The module's own parameters, which are leaf tensors that require gradients.

        Raises:
            RuntimeError: The model is already loaded. Use a ``clone``.
            ValueError: A name is missing or unknown, or a shape is wrong.
        """
        if self._installed is not None:
            raise RuntimeError("this model is loaded already. Use a copy from clone().")
        if missing := self._leaves.keys() - params.keys():
            raise ValueError(f"these parameters are missing: {', '.join(sorted(missing))}")
        training, buffers = self.module.training, buffers or {}
        installed = self._installed = dict(self._leaves)
        try:
            with self.untrained.watched() if self.untrained.any else nullcontext():
                _copy_into(self._leaves, params, "parameter")
                _copy_into(self.untrained.sent, buffers, "buffer")
                self.module.train(train)
                yield installed
        finally:
            self._installed = None
            installed.clear()
            for name in self._shared:  # give these parameters memory of their own again; see ``share``
                self._leaves[name].data = torch.empty_like(self._initial_params[name])
            self._shared.clear()
            _copy_into(self._leaves, self._initial_params)
            _copy_into(self.untrained.sent, self._initial_buffers)
            for leaf in self._leaves.values():
                leaf.grad = None
            self.module.train(training)

    def load_for_good(self, train: bool = False) -> Params:
        """Load the initial values without a ``with`` block, so that the model stays loaded. See ``share``.

        Args:
            train: Whether the module is in training mode.

        Returns:
            The module's own parameters, which ``loaded`` also yields.

        Raises:
            RuntimeError: The model is already loaded.
        """
        self._refuse_loaded("loaded")
        self._installed = dict(self._leaves)
        self.untrained.watch()
        self.module.train(train)
        return self._installed

    def share(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Put the tensors of ``params`` and copies of ``buffers`` into a loaded module. Shapes are not checked.

        The module and ``params`` then share memory, so use this method only for passes that do not change parameters.
        The tensors ``params`` must not change until other parameters are loaded or shared.

        Raises:
            RuntimeError: The model is not loaded.
        """
        if self._installed is None:
            raise RuntimeError("share() can be called only inside 'with model.loaded(...)'")
        if self.untrained.any:
            self.untrained.restore(buffers or {})
        for name, leaf in self._leaves.items():
            given, initial = params[name], self._initial_params[name]
            if given is self._shared.get(name):
                continue
            if given.stride() == initial.stride() and given.dtype == initial.dtype:
                leaf.data = self._shared[name] = given
            else:  # the tensor is not in the module's memory format, for example because it is from a message or a file
                self._shared.pop(name, None)
                leaf.data = torch.empty_like(initial).copy_(given)

    def to(self, device: torch.device | str) -> Model:
        """Move the module and its initial values to ``device``, and return the model itself.

        Raises:
            RuntimeError: The model is in use inside a ``with model.loaded(...)`` block.
        """
        self._refuse_loaded("moved")
        self.module.to(device)
        self._collect(self.untrained.constant)
        return self

    def clone(self) -> Model:
        """Return an independent model with the same initial values, for another thread.

        Raises:
            RuntimeError: The model is in use inside a ``with model.loaded(...)`` block.
        """
        self._refuse_loaded("cloned")
        constant = self.untrained.constant
        twin = Model(twin_of(self.module, constant.values()), self._named_head)
        if constant:
            twin.keep_constant(constant)
        twin.module.train(self.module.training)
        return twin

    def _refuse_loaded(self, verb: str) -> None:
        if self._installed is not None:
            raise RuntimeError(f"a model cannot be {verb} while it is loaded")


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """During a ``with`` block, put a model into evaluation mode: dropout is off, and BatchNorm statistics are fixed."""
    training = model.module.training
    model.module.eval()
    try:
        yield
    finally:
        model.module.train(training)


def forward(module: nn.Module, x: Inputs) -> Tensor:
    """Return a module's logits for a batch. The batch is a tensor, or a mapping from argument names to tensors."""
    return unwrapped(module(x) if isinstance(x, Tensor) else module(**x))


def require_trainable(module: nn.Module) -> None:
    """Raise ``SpecError`` if a module has no trainable parameters, or if its trainable parameters are not float32."""
    trained = {name: tensor.dtype for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not trained:
        raise SpecError(
            "model",
            f"{type(module).__name__} has no parameter that requires gradients. Use a model that can be trained.",
        )
    if wrong := [f"{name} is {str(dtype)[6:]}" for name, dtype in trained.items() if dtype != torch.float32]:
        listed = ", ".join(wrong[:6]) + " …" * (len(wrong) > 6)
        problem = f"{listed}, but trainable parameters must be float32. Convert them with float(), or freeze them"
        raise SpecError("model", f"{problem} with requires_grad_(False).", type(module).__name__)


def unwrapped(output: Any) -> Tensor:
    """Return the logits in a module's output: the output itself, its ``logits``, or the first item of a tuple."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):  # checked before tuples, because a named tuple can have logits
        return output.logits  # type: ignore[no-any-return]
    return output[0] if isinstance(output, tuple) and output else output  # type: ignore[no-any-return]


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """For tensors with several names, return a mapping from each tensor's first name to its other names."""
    names: dict[int, list[str]] = {}
    for prefix, part in module.named_modules():
        for name, tensor in itertools.chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    return {first: others for first, *others in names.values() if others}


def _copies(tensors: Mapping[str, Tensor]) -> Params:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _copy_into(targets: Params, sources: Mapping[str, Tensor], kind: str = "tensor") -> None:
    """Copy values into tensors of the same names and shapes."""
    for name, tensor in sources.items():
        if name not in targets:
            raise ValueError(f"{name!r} is not a {kind} of this model. Use one of: {', '.join(targets) or 'none'}")
        if tensor.shape != targets[name].shape:  # ``copy_`` would broadcast some wrong shapes without an error
            shapes = f"{tuple(tensor.shape)}, but must have shape {tuple(targets[name].shape)}"
            raise ValueError(f"{kind} {name!r} has shape {shapes}")
    if sources:
        with torch.no_grad():
            torch._foreach_copy_([targets[name] for name in sources], list(sources.values()))
