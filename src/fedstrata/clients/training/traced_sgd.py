"""Take SGD steps on single samples by replaying a trace of tensor operations.

With one sample per step, autograd and optimisers spend most of their time on overhead. This module records the tensor
operations of one step (forward, backward, update) in a graph, simplifies the graph, and runs it for each sample.
Tracing takes a tenth of a second and does not need a compiler.

A model cannot be traced if its operations depend on values of tensors, or if it uses tensors other than its parameters.
Models that cannot be traced are trained with autograd. The results are the same, except that sums may be computed in a
different order.

If Stratify trains on single samples with a trace instead of autograd, it is 2.4 times as fast on an MLP, and 1.9 times
as fast on a convolutional network (``benchmarks/fast_paths.py``).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]
"""A function ``loss(params, x, y)`` that returns a scalar and depends only on its arguments."""

_ATEN = torch.ops.aten
_VIEWS = {_ATEN.t.default, _ATEN.view.default, _ATEN.permute.default, _ATEN.transpose.int, _ATEN.unsqueeze.default}
_BACK_POOL = _ATEN.max_pool2d_with_indices_backward.default
_SAME = {_ATEN.detach.default, _ATEN.alias.default}


class TracedSGD:
    """SGD on one sample at a time: w ← w − η (∇ loss + λ w).

    Args:
        loss: The function to minimise.
        params: The initial parameters, which the object copies.
        x: An example input, shape (1, …). Only the shape and the dtype matter.
        y: An example label, shape (1,). Only the dtype matters.
        weight_decay: The weight decay λ.

    Raises:
        Exception: The loss cannot be traced.

    >>> sgd = TracedSGD(lambda p, x, y: (p["w"] @ x[0] - y[0]).square(), {"w": torch.zeros(2)},
    ...                 torch.ones(1, 2), torch.ones(1))
    >>> sgd.run(torch.ones(1, 2), torch.ones(1), lr=0.25), sgd.params()
    (tensor([1.]), {'w': tensor([0.5000, 0.5000])})
    """

    def __init__(self, loss: Loss, params: Params, x: Tensor, y: Tensor, weight_decay: float = 0.0) -> None:
        self._params = {name: _plain_strides(tensor.detach().clone()) for name, tensor in params.items()}
        graph = _traced(loss, self._params, _plain_strides(x), y)
        _simplify(graph)
        self.random = any(_is_random(node) for node in graph.nodes)
        """Whether a step draws random numbers, as a dropout layer does."""
        bound = _bind_views(graph, list(self._params.values()))
        _append_updates(graph, weight_decay)
        _pool_by_pixels(graph, [*bound, _plain_strides(x), y, -1.0])
        self._step: Callable[..., Tensor] = fx.GraphModule(nn.Module(), graph).forward
        self._bound = bound

    def load(self, params: Params) -> None:
        """Set the current parameters to the values of ``params``."""
        with torch.no_grad():
            torch._foreach_copy_(list(self._params.values()), [params[name] for name in self._params])

    def params(self) -> Params:
        """Return copies of the current parameters."""
        return {name: tensor.clone() for name, tensor in self._params.items()}

    def run(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take one SGD step per sample, in the order of the samples.

        Args:
            x: The inputs of n ≥ 1 samples, shape (n, …).
            y: Labels, shape (n,).
            lr: The learning rate η.

        Returns:
            The loss of each sample before its step, shape (n,).
        """
        step, bound = self._step, self._bound
        # Turn off oneDNN, because for a single sample the setup of its operations takes longer than the time that they
        # save.
        with torch.inference_mode(), _without_onednn():
            samples = zip(torch.split(_plain_strides(x), 1), torch.split(y, 1), strict=True)
            losses = [step(*bound, sample, label, -lr) for sample, label in samples]
            stacked = torch.stack(losses)
        return stacked.clone()  # a tensor made in inference mode cannot be used with autograd


def _plain_strides(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor. The view has the strides of a new tensor of the same shape.

    A tensor that is not contiguous is returned unchanged. The strides matter for images with one channel, which are
    contiguous in two memory formats at once. Convolutions choose the format by the strides, and take five times as long
    in channels-last format.
    """
    if not tensor.is_contiguous():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns if oneDNN's flags are set on a machine without a GPU
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _traced(loss: Loss, params: Params, x: Tensor, y: Tensor) -> fx.Graph:
    """Return the traced graph of a forward and backward pass.

    The inputs of the graph are the parameters, x and y. The outputs are the gradient of each parameter, and the loss.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(params)

    def gradients(*inputs: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(True) for tensor in inputs[:-2]]
        with torch.enable_grad():
            value = loss(dict(zip(names, leaves, strict=True)), inputs[-2], inputs[-1])
            by_leaf = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return [*by_leaf, value.detach()]

    # Trace with fake tensors, which have no values, so that tracing fails if an operation depends on values. With real
    # tensors, the graph would fit only the values of this batch.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(gradients, tracing_mode="fake")(*params.values(), x, y)
    graph: fx.Graph = traced.graph
    if any(node.op == "get_attr" for node in graph.nodes):
        raise ValueError("the loss cannot be traced, because it uses tensors other than its arguments")
    return graph


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _mutated(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are changed in place by an operation of the graph."""
    changed = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument, schema in zip(node.args, node.target._schema.arguments, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write and isinstance(argument, fx.Node):
                    changed.add(argument)
    return changed


def _simplify(graph: fx.Graph) -> None:
    """Remove operations without effect, such as transposing twice, or summing over a dimension of length 1."""
    changed = _mutated(graph)
    for node in list(graph.nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            continue
        replacement: fx.Node | None = None
        if node.target in _SAME:
            replacement = source
        elif node.target is _ATEN.t.default and source.target is _ATEN.t.default:
            replacement = cast(fx.Node, source.args[0])
        elif (
            node.target is _ATEN.sum.dim_IntList
            and len(node.args) == 3
            and node.args[2] is True
            and source not in changed
            and all(_value(source).shape[axis] == 1 for axis in node.args[1])
        ):
            replacement = source
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _bind_views(graph: fx.Graph, params: list[Tensor]) -> list[Tensor]:
    """Turn views of parameters, such as transposes, into inputs of the graph, so that steps do not create these views.

    A view shares its parameter's memory, so it stays valid when the parameter changes in place.

    Args:
        graph: The graph, which changes in place.
        params: The parameters, which are the first inputs.

    Returns:
        The tensors for the graph's first inputs (before x): the parameters, followed by the views.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    bound = dict(zip(inputs, params, strict=False))
    for node in list(graph.nodes):
        if node.target in _VIEWS and node.args[0] in bound:
            tensor = node.target(bound[node.args[0]], *node.args[1:], **node.kwargs)
            with graph.inserting_before(inputs[len(params)]):
                view = graph.placeholder(f"view_{len(bound)}")
            view.meta = node.meta
            node.replace_all_uses_with(view)
            graph.erase_node(node)
            bound[view] = tensor
    return list(bound.values())


def _append_updates(graph: fx.Graph, weight_decay: float) -> None:
    """Append the updates of all parameters to the graph, and make the loss the only output of the graph."""
    output = next(node for node in graph.nodes if node.op == "output")
    (results,) = output.args
    *gradients, loss = results
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    params = placeholders[: len(gradients)]
    # If a gradient is a matrix product, addmm_ can compute the product and the update in one operation, after earlier
    # updates. The product's factors must then not be among ``changed``, the tensors that updates overwrite.
    changed = _mutated(graph) | set(placeholders[:-2])
    with graph.inserting_after(placeholders[-1]):
        rate = graph.placeholder("rate")  # the negative learning rate, −η
    with graph.inserting_before(output):
        keep: Any = 1.0
        if weight_decay:
            keep = graph.call_function(operator.mul, (rate, weight_decay))
            keep = graph.call_function(operator.add, (keep, 1.0))
        for param, gradient in zip(params, gradients, strict=True):
            _append_update(graph, param, gradient, rate, keep, changed)
    output.args = (loss,)
    for gradient in dict.fromkeys(gradients):
        if not gradient.users:
            graph.erase_node(gradient)
    graph.lint()


def _append_update(
    graph: fx.Graph, param: fx.Node, gradient: fx.Node, rate: fx.Node, keep: Any, changed: set[fx.Node]
) -> None:
    is_product = gradient.target is _ATEN.mm.default and len(gradient.users) == 1
    if is_product and not changed.intersection(_roots(gradient)):
        call: tuple[Any, ...] = (param, *gradient.args)
        graph.call_function(torch.Tensor.addmm_, call, {"beta": keep, "alpha": rate})
        return
    if not isinstance(keep, float):
        graph.call_function(torch.Tensor.mul_, (param, keep))
    graph.call_function(torch.Tensor.add_, (param, gradient), {"alpha": rate})


def _pool_by_pixels(graph: fx.Graph, inputs: list[Any]) -> None:
    """Let max-pooling read its input in channels-last format, for which PyTorch has a fast kernel.

    Args:
        graph: The graph, which changes in place.
        inputs: Example inputs of the graph: tensors, and a number for the learning rate.
    """
    pools = [node for node in graph.nodes if node.target is _ATEN.max_pool2d_with_indices.default]
    copies = []
    for pool in pools:
        source, value = pool.args[0], _value(pool.args[0])
        if value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_after(source):
            copy = graph.call_function(_ATEN.clone.default, (source,), {"memory_format": torch.channels_last})
        for user in [pool, *(node for node in source.users if node.target is _BACK_POOL)]:
            user.replace_input_with(source, copy)
        copies.append((copy, source))
    try:
        FakeTensorProp(fx.GraphModule(nn.Module(), graph)).propagate(*inputs)
    except RuntimeError:
        # A later operation makes a view that is possible only in the original format. Undo the change of format.
        for copy, source in copies:
            copy.replace_all_uses_with(source)
            graph.erase_node(copy)


def _roots(product: fx.Node) -> set[fx.Node]:
    """Return the nodes of a product's factors and of the tensors whose memory the factors share.

    For example, the transpose of a matrix shares the matrix's memory.
    """
    roots: set[fx.Node] = set()
    for factor in product.args:
        node = factor
        while isinstance(node, fx.Node):
            roots.add(node)
            node = node.args[0] if node.target in _VIEWS else None
    return roots
