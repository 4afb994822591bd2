"""SGD on simple networks by hand.

A mini-batch of an MLP is so little work that autograd's bookkeeping takes as long as the arithmetic. For a chain of
``nn.Linear`` with ``nn.ReLU`` between them and cross-entropy at its end, the backward pass is a few lines, and a
weight's gradient ``δᵀ a`` can go straight into the weight (``addmm_``) without ever being stored. Convolutions, each
with a max-pooling of 2x2 and a ReLU, may stand before; there the gain is memory: the gradient of a convolution's output
is written where that output was. The sums are those of autograd, added up in another order at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata.nn.model import Params
from fedstrata.nn.zoo import Classifier

_ops = torch.ops.aten
_THRESHOLD = _ops.threshold_backward.default
_THRESHOLD_INTO = _ops.threshold_backward.grad_input
_POOL, _UNPOOL_INTO = _ops.max_pool2d_with_indices.default, _ops.max_pool2d_with_indices_backward.grad_input
_CONVOLVED_BACK = _ops.convolution_backward.default
_WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)
"""Side, stride, padding, dilation of the pooling, and whether a cut-off window counts."""

Pair = tuple[int, int]


class Block(NamedTuple):
    """A convolution, then a max-pooling of 2x2 and a ReLU, whose order makes no difference.

    Args:
        weight: The name of the convolution's weight, (out, in, rows, columns).
        bias: The name of its bias, (out,).
        stride: Its stride.
        padding: Zeros that it adds at each side.
    """

    weight: str
    bias: str
    stride: Pair
    padding: Pair


class _Pooled(NamedTuple):
    """What a block's backward pass needs of its forward pass."""

    inputs: Tensor
    convolved: Tensor
    indices: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class ManualSGD:
    """A chain of layers with ReLU between them, as a function of its parameters.

    Args:
        blocks: The convolutions at its beginning, if any.
        names: The names of each linear layer's weight (out, in) and bias (out,), "" for no bias.

    >>> chain = ManualSGD.of(nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)))
    >>> params = {"1.weight": torch.zeros(2, 1)}
    >>> loss = chain.step(params, torch.ones(1, 1), torch.tensor([1]), lr=1.0)
    >>> round(loss.item(), 4), params["1.weight"].flatten().tolist()
    (0.6931, [-0.5, 0.5])
    """

    blocks: tuple[Block, ...]
    names: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, module: nn.Module) -> ManualSGD | None:
        """The chain that ``module`` is, or None where it is anything else or somebody listens to its layers."""
        if any(_is_watched(part) for part in module.modules()) or any(True for _ in module.buffers()):
            return None
        parts = list(_parts(module, ""))
        layers = [part for _, part in parts]
        blocks: list[Block] = []
        while (block := _block_of(parts)) is not None:
            blocks.append(block)
            del parts[:3]
        flattened = 0
        while parts and type(flatten := parts[0][1]) is nn.Flatten and (flatten.start_dim, flatten.end_dim) == (1, -1):
            parts.pop(0)
            flattened += 1
        linear, between = parts[::2], parts[1::2]
        fits = len(parts) % 2 == 1 and all(type(part) is nn.ReLU for _, part in between)
        if not fits or any(type(part) is not nn.Linear for _, part in linear) or (blocks and not flattened):
            return None
        params = [p for part in layers for p in part.parameters(recurse=False)]
        if len(set(params)) < len(params) or not all(p.requires_grad and p.dtype == torch.float32 for p in params):
            return None
        names = ((f"{name}weight", f"{name}bias" if part.bias is not None else "") for name, part in linear)
        return cls(tuple(blocks), tuple(names))

    def step(self, params: Params, x: Tensor, y: Tensor, lr: float, weight_decay: float = 0.0) -> Tensor:
        """One step of SGD in place: w ← w − η (∇ loss + λ w).

        Args:
            params: The parameters, without gradients.
            x: Inputs, (B, …).
            y: Labels, (B,).
            lr: η.
            weight_decay: λ.

        Returns:
            The mean loss before the step, a scalar.
        """
        with torch.inference_mode():
            loss, parts, convolutions = self._backward(params, x, y)
            keep = 1.0 - lr * weight_decay
            for (weight, bias), (delta, inputs) in zip(self.names, parts, strict=True):
                params[weight].addmm_(delta.t(), inputs, beta=keep, alpha=-lr)
                if bias:
                    params[bias].addmv_(delta.t(), delta.new_ones(len(delta)), beta=keep, alpha=-lr)
            for name, gradient in convolutions.items():
                params[name].mul_(keep).add_(gradient, alpha=-lr)
            return loss

    @torch.no_grad()
    def gradient(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean loss, and its gradient by parameter in the order of ``params``."""
        loss, parts, found = self._backward(params, x, y)
        for (weight, bias), (delta, inputs) in zip(self.names, parts, strict=True):
            found[weight] = delta.t().mm(inputs)
            if bias:
                found[bias] = delta.sum(0)
        return loss, [found[name] for name in params]

    def _backward(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Params]:
        """The loss, and what the gradients are made of.

        Returns:
            The loss; for each linear layer, the gradient δ of the loss by its output, (B, out), and its input; the
            gradients of the convolutions' parameters.
        """
        pooled: list[_Pooled] = []
        for block in self.blocks:
            pooled.append(_forward(block, params, x))
            x = pooled[-1].outputs
        layers = [(params[weight], params[bias] if bias else None) for weight, bias in self.names]
        inputs = [x.flatten(1)]
        for layer in layers[:-1]:
            inputs.append(F.linear(inputs[-1], *layer).relu_())
        log_p = torch.log_softmax(F.linear(inputs[-1], *layers[-1]), 1)
        loss = F.nll_loss(log_p, y)
        # The gradient of the mean: (softmax − one-hot) / B.
        delta = log_p.exp_()
        delta.scatter_add_(1, y[:, None], delta.new_full((len(y), 1), -1.0)).div_(len(y))
        deltas = [delta]
        for place in range(len(layers) - 1, 0, -1):
            deltas.append(_THRESHOLD(deltas[-1].mm(layers[place][0]), inputs[place], 0))
        found: Params = {}
        if pooled:
            gradient = torch.empty_like(x)  # in the memory format in which pooling and convolution are fast
            gradient.copy_(deltas[-1].mm(layers[0][0]).view(x.shape))
            for place in range(len(pooled) - 1, -1, -1):
                block = self.blocks[place]
                weight = params[block.weight]
                gradient, *own = _back(block, weight, pooled[place], gradient, further=place > 0)
                found[block.weight], found[block.bias] = own
        return loss, list(zip(reversed(deltas), inputs, strict=True)), found


def _forward(block: Block, params: Params, x: Tensor) -> _Pooled:
    convolved = F.conv2d(x, params[block.weight], params[block.bias], block.stride, block.padding)
    outputs, indices = _POOL(convolved, *_WINDOW)
    return _Pooled(x, convolved, indices, outputs.relu_())


def _back(
    block: Block, weight: Tensor, pooled: _Pooled, gradient: Tensor, *, further: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient by the block's input (where anything lies further on), its weight and its bias."""
    _THRESHOLD_INTO(gradient, pooled.outputs, 0, grad_input=gradient)
    # Only the shape of what was pooled is looked at, so that its memory is free for the gradient.
    by_output = pooled.convolved
    _UNPOOL_INTO(gradient, by_output, *_WINDOW, pooled.indices, grad_input=by_output)
    found: tuple[Tensor, Tensor, Tensor] = _CONVOLVED_BACK(
        by_output,
        pooled.inputs,
        weight,
        [len(weight)],
        block.stride,
        block.padding,
        [1, 1],
        False,
        [0, 0],
        1,
        [further, True, True],
    )
    return found


def _block_of(parts: list[tuple[str, nn.Module]]) -> Block | None:
    """The block that the next three layers are, if they are one."""
    if len(parts) < 3 or type(convolution := parts[0][1]) is not nn.Conv2d or convolution.bias is None:
        return None
    pools = [part for _, part in parts[1:3] if type(part) is nn.MaxPool2d]
    rectifiers = [part for _, part in parts[1:3] if type(part) is nn.ReLU]
    plain = (convolution.groups, convolution.dilation, convolution.padding_mode) == (1, (1, 1), "zeros")
    if not plain or isinstance(convolution.padding, str) or len(pools) != 1 or len(rectifiers) != 1:
        return None
    pool = pools[0]
    window = [list(_pair(value)) for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
    if [*window, pool.ceil_mode] != list(_WINDOW) or pool.return_indices:
        return None
    stride, padding = _pair(convolution.stride), _pair(convolution.padding)
    return Block(f"{parts[0][0]}weight", f"{parts[0][0]}bias", stride, padding)


def _pair(value: object) -> Pair:
    return tuple(value) if isinstance(value, tuple) else (value, value)


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that a module calls one after another; itself where it is no plain sequence."""
    if type(module) in (nn.Sequential, Classifier):  # a Classifier's body and head stand in the order of their calls
        # Not named_children(), which leaves out a layer that comes again.
        for child, part in module._modules.items():
            if part is not None:
                yield from _parts(part, f"{name}{child}.")
    else:
        yield name, module


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
