"""Checks, before the first round, that secure sums (``privacy.sums``) are possible in a run."""

from __future__ import annotations

from typing import Any

from fedstrata.aggregation.base import MeanBySize
from fedstrata.aggregation.robust import RobustAggregator
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.federation.engine import Engine, FederationConfig
from fedstrata.federation.federation import Listener
from fedstrata.federation.secure.fit import FitForm
from fedstrata.federation.settings import Privacy
from fedstrata.methods.base import Method, Recipe
from fedstrata.methods.fedavg import FedAvg
from fedstrata.objectives.base import CrossEntropy
from fedstrata.sampling.base import AllData, Uniform
from fedstrata.spec.experiment import Experiment

PLAIN = "Use method.name = 'fedavg' with its defaults, or privacy.sums = 'plain'."


def check_secure_sums(spec: Experiment, config: FederationConfig, held: HeldOut) -> None:
    """Check the method, the model and the settings against ``privacy.sums = "secure"``.

    Raises:
        SpecError: The server would need single replies, or the sum is not implemented for a setting.
        ExtraMissingError: The extra ``secure`` is not installed.
    """
    from fedstrata.federation.secure import protocol

    training, evaluation, privacy = config.training, spec.evaluation, config.privacy
    if config.sizes is None:
        _check_sites(spec)
    _check_method(spec.method)
    single = "the server does not see single updates with privacy.sums = 'secure'"
    refusals: list[tuple[bool, str, Any, str]] = [
        (spec.attack is not None, "attack", getattr(spec.attack, "name", ""), f"{single}. Remove the section."),
        (not spec.communication.plain, "communication", ..., "codecs have no secure sum yet. Remove the section."),
        (evaluation.weight_diversity, "evaluation.weight_diversity", True, f"{single}. Remove it."),
        (
            held.own_test is not None and config.sizes is not None,
            "evaluation",
            ...,
            "the metrics of single clients are no sums. Remove client_test.",
        ),
        (privacy.dp is not None, "privacy.dp", ..., "is not supported with privacy.sums = 'secure' yet. Remove one."),
        (
            config.task.weighted,
            "task",
            config.task.name,
            "samples of different weights have no secure sum yet. " + PLAIN,
        ),
        (
            bool(config.model.buffers()),
            "model",
            spec.model.name,
            "has buffers, which have no secure sum yet. Use a model without BatchNorm.",
        ),
        (
            not all(tensor.is_floating_point() for tensor in config.model.params().values())
            or not all(spec.method.objective_in_use().trains(name, config.model) for name in config.model.params()),
            "model",
            spec.model.name,
            "has parameters that are not trained, which have no secure sum yet. Use another model.",
        ),
    ]
    for refused, key, value, problem in refusals:
        if refused:
            raise SpecError(key, problem, value)
    invited = training.invited(config.clients)
    least = max(protocol.FEWEST, privacy.parties)
    if not least <= invited <= protocol.MOST_SITES or config.clients < least:
        problem = f"a secure sum needs {least} to {protocol.MOST_SITES} clients per round. Set it to such a number."
        raise SpecError("training.clients_per_round", problem, invited)
    FitForm(config)


def _check_method(method: Method) -> None:
    """Refuse methods other than FedAvg, with the reason."""
    if not isinstance(method, Recipe):
        problem = f"asks clients for more than the sum of their updates, so it has no secure sum. {PLAIN}"
        raise SpecError("method.name", problem, method.name)
    sampler, data, objective, aggregator = method.choices()
    if type(sampler) is not Uniform or sampler.replacement:
        what = "draws clients by their sizes or single replies, or draws a client twice"
        raise SpecError("method.client_sampler", f"{what}, so it has no secure sum. {PLAIN}", sampler.name)
    if type(data) is not AllData:
        problem = f"asks clients for more than the sum of their updates, so it has no secure sum. {PLAIN}"
        raise SpecError("method.data_sampler", problem, data.name)
    if type(aggregator) is not MeanBySize:
        robust = isinstance(aggregator, RobustAggregator)
        what = "compares single updates, which the server does not see" if robust else "is not implemented yet"
        raise SpecError("method.aggregator", f"{what} with privacy.sums = 'secure'. {PLAIN}", aggregator.name)
    problem = f"is not implemented with privacy.sums = 'secure' yet. {PLAIN}"
    if type(objective) is not CrossEntropy:
        raise SpecError("method.objective", problem, objective.name)
    if type(method) is not FedAvg:
        raise SpecError("method.name", problem, method.name)


def _check_sites(spec: Experiment) -> None:
    """Refuse settings with which real sites would send more than sums, or send sums of an unknown size."""
    for key in ("client_test", "validation"):
        if (share := getattr(spec.evaluation, key)) is not None:
            problem = "the metrics of single sites are no sums. Remove it, and give the server test samples."
            raise SpecError(f"evaluation.{key}", problem, share)
    if spec.privacy.largest is None:
        problem = "is required at real sites, because the server does not know their numbers of samples. Set a bound"
        raise SpecError("privacy.largest", f"{problem} that is not a secret.")


def refuse_secure_sums(spec: Experiment) -> None:
    """Refuse secure sums in NVFlare's simulator, whose sites have no certificates.

    Raises:
        SpecError: The spec sets ``privacy.sums`` to "secure".
    """
    if spec.privacy.sums == "secure":
        problem = "needs certificates, which NVFlare's simulator does not have. Use the engine 'local', or deploy."
        raise SpecError("privacy.sums", problem, spec.privacy.sums)


def check_secure_run(privacy: Privacy, engine: str | Engine, listener: Listener | None) -> None:
    """Check how a run with secure sums is started.

    Args:
        privacy: The settings of privacy.
        engine: The engine, or its name.
        listener: The listener of the run.

    Raises:
        SpecError: The engine cannot simulate masks, or a listener wants single replies.
    """
    if listener is not None:
        problem = "a listener, such as an audit, needs single replies. Use 'plain', or remove the listener."
        raise SpecError("privacy.sums", problem, privacy.sums)
    if privacy.simulate_masks and isinstance(engine, str) and engine != "local":
        raise SpecError("privacy.simulate_masks", f"is not for the engine {engine!r}. Use 'local', or remove it.", True)
