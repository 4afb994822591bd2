"""Find the head of a model, the submodule that computes logits from features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedstrata.base.errors import SpecError, not_among


@dataclass(frozen=True)
class Head:
    """The head of a module.

    Args:
        name: The dotted name of the head in the module.
        module: The head itself.
        params: A mapping from the name of each trainable parameter in the head to its name in the whole module.
    """

    name: str
    module: nn.Module
    params: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module, name: str | None, trained: Mapping[str, Tensor]) -> Head:
        """Return the head of a module.

        Args:
            module: The whole module.
            name: The dotted name of the head. Default: the submodule ``head`` or, if it is missing, the last trained
                ``nn.Linear``.
            trained: The trainable parameters of the whole module.

        Raises:
            SpecError: The module has no head, or no submodule of this name.
        """
        name = _find(module) if name is None else name
        modules = dict(module.named_modules(remove_duplicate=False))
        if name not in modules:
            named = [each for each in modules if each]  # the module itself has an empty name
            raise SpecError("model.head", not_among("is not a submodule of the model", name, named), name)
        # Find the head's parameters by identity and not by the prefix of their names, because a submodule with two
        # names has its parameters only under the first name.
        names = {id(tensor): full for full, tensor in trained.items()}
        inside = {local: names.get(id(tensor)) for local, tensor in modules[name].named_parameters()}
        return cls(name, modules[name], {local: full for local, full in inside.items() if full is not None})

    def feature_size(self) -> int:
        """Return the length d of a feature vector: the input size of the head's first linear layer.

        Raises:
            SpecError: The head has no linear layer.
        """
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear):
                return layer.in_features
        problem = f"the head {self.name!r} does not have an nn.Linear, so the number of features is unknown. Use a "
        problem += "head that begins with nn.Linear."
        raise SpecError("model.head", problem)


def _find(module: nn.Module) -> str:
    head = getattr(module, "head", None)
    if isinstance(head, nn.Module) and not _is_frozen(head):
        return "head"
    linear: list[str] = [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear) and not _is_frozen(part)
    ]
    linear = [name for name in linear if not _in_adapter(module, name)]
    if not linear:
        problem = f"{type(module).__name__} has neither a submodule 'head' nor a trained nn.Linear"
        advice = "Name the classifier 'head', or pass its name: Model(module, head='dotted.name')."
        raise SpecError("model.head", f"{problem}. {advice}")
    return linear[-1]


def _is_frozen(module: nn.Module) -> bool:
    """Return True if a module has parameters and none of them requires gradients."""
    needs = [tensor.requires_grad for tensor in module.parameters()]
    return bool(needs) and not any(needs)


def _in_adapter(module: nn.Module, name: str) -> bool:
    """Return True if a submodule is part of a LoRA adapter, judged by its name or the name of its Python class."""
    parts = name.split(".") if name else []
    inside = [module.get_submodule(".".join(parts[: depth + 1])) for depth in range(len(parts))]
    return any(re.match("(?i)(.*_)?lora", part) for part in parts) or any(
        re.search("L[oO][rR][aA]", type(part).__name__) for part in inside
    )
