"""Check before the first round whether a run can guarantee sample-level differential privacy (``privacy.dp``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import each
from fedstrata.clients.training.private import NoisyGradient
from fedstrata.data.dataset import Dataset
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Fit
from fedstrata.methods.base import Method
from fedstrata.objectives.base import Batch, Context, is_plain
from fedstrata.runs.accountant import Accountant

USE = "Use a method such as fedavg, fedprox or scaffold."


def check_privacy(method: Method, config: FederationConfig, data: Dataset) -> None:
    """Check that the method, the model and the settings allow ``privacy.dp``.

    Raises:
        SpecError: A sample would affect the gradients of other samples, or a client would send values without noise.
    """
    training, objective, dp = config.training, method.objective_in_use(), config.privacy.dp
    assert dp is not None

    def refuse(reason: str, key: str = "privacy.dp", value: object = dp.noise) -> None:
        raise SpecError(key, reason, value)

    if training.clip is not None:
        problem = "cannot be used with privacy.dp, which already clips each sample's gradient. Remove training.clip."
        refuse(problem, "training.clip", training.clip)
    if training.accumulate > 1:
        problem = (
            "cannot be used with privacy.dp, which already computes gradients for a few samples at a time. Remove the "
            "key, and increase training.batch_size."
        )
        refuse(problem, "training.accumulate", training.accumulate)
    if config.model.has_batchnorm:
        refuse("with BatchNorm, a sample affects the gradients of other samples. Use a model without BatchNorm.")
    if config.task.weighted:
        refuse(f"does not support the task {config.task.name!r}, in which samples have weights. Use another task.")
    if not vars(type(objective)).get("single_samples", False):
        refuse(f"the objective of {method.name!r} is not a sum of losses of individual samples. {USE}")
    if not is_plain(objective, "displacement"):
        refuse(f"the objective of {method.name!r} computes gradients at perturbed parameters, unlike DP-SGD. {USE}")
    asked = method.declared(config)
    unprotected = [each.label for each in asked or () if each.innermost.request is not Fit]
    if asked is None or unprotected:
        replies = "unknown replies" if asked is None else f"replies to {', '.join(unprotected)}"
        refuse(f"the method {method.name!r} needs {replies}, but noise is added only to updates. {USE}")
    if any(each.innermost.where.get("keep") != 1 for each in asked or ()):
        refuse(f"with the method {method.name!r}, clients train on only a part of their samples. {USE}")
    _try_gradient(method, config, data)
    if dp.budget is not None and config.sizes is not None:
        epsilon = Accountant(dp, training, config.sizes).largest(np.ones_like(config.sizes))
        if epsilon > dp.budget:
            problem = f"is too small, because the first round could spend ε = {epsilon:.3g}. "
            problem += "Use a larger budget, more noise, or fewer local steps."
            raise SpecError("privacy.dp.budget", problem, dp.budget)


def _two_zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros((2, *tensor.shape[1:]))


def _try_gradient(method: Method, config: FederationConfig, data: Dataset) -> None:
    """Raise ``SpecError`` if PyTorch cannot compute the gradients of several samples in one call.

    The samples in this test are zeros, because the server of a deployment may not have samples.
    """
    model, objective, dp = config.model, method.objective_in_use(), config.privacy.dp
    assert dp is not None
    params = model.params()
    context = Context(params, torch.zeros(0), objective.message(None), None, 1.0, task=config.task)
    gradient = NoisyGradient(model, objective, context, dp, 2.0, torch.zeros)
    inputs, targets = data.inputs(slice(0, 0)), data.targets(slice(0, 0))
    batch = Batch(each(inputs, _two_zeros), _two_zeros(targets))
    names = [name for name in params if objective.trains(name, model)]
    try:
        with model.loaded(params, model.buffers(), train=True) as loaded:
            gradient(loaded, names, batch)
    except Exception as error:  # PyTorch raises many kinds of exceptions
        problem = f"PyTorch cannot compute per-sample gradients for the model ({error}). Use another model."
        raise SpecError("privacy.dp", problem, dp.noise) from error
