"""Checks, before the first round, that secure sums (``privacy.sums``) are possible in a run."""

from __future__ import annotations

from typing import Any

from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.federation.allowed import declares
from fedstrata.federation.engine import Engine, FederationConfig
from fedstrata.federation.federation import Listener
from fedstrata.federation.settings import Privacy
from fedstrata.methods.base import CHOICES, READING, Method, Recipe
from fedstrata.spec.experiment import Experiment

UNDECLARED = "does not declare that sums over clients are enough (needs_replies)"


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
    check_replies(spec.method)
    single = "the server does not see single updates with privacy.sums = 'secure'"
    refusals: list[tuple[bool, str, Any, str]] = [
        (spec.attack is not None, "attack", getattr(spec.attack, "name", ""), f"{single}. Remove the section."),
        (not spec.communication.plain, "communication", ..., "codecs have no secure sum yet. Remove the section."),
        (evaluation.weight_diversity, "evaluation.weight_diversity", True, f"{single}. Remove it."),
        (
            held.own_test is not None and config.sizes is not None,
            "evaluation",
            ...,
            "the metrics of single clients are not sums. Remove client_test.",
        ),
    ]
    for refused, key, value, problem in refusals:
        if refused:
            raise SpecError(key, problem, value)
    invited = spec.method.most_summed(config)
    least = max(protocol.FEWEST, privacy.parties)
    if not least <= invited <= protocol.MOST_SITES or config.clients < least:
        problem = f"a secure sum needs {least} to {protocol.MOST_SITES} clients per round. Use a number in this range."
        everyone = invited != training.invited(config.clients)
        raise SpecError("partition.clients" if everyone else "training.clients_per_round", problem, invited)
    if not spec.method.forms(config):
        raise SpecError("method.name", f"{UNDECLARED}. Use another method, or 'plain' sums.", spec.method.name)


def check_replies(method: Method) -> None:
    """Check that a method and its choices need only sums of replies.

    Raises:
        SpecError: The server needs single replies; the message gives the reason.
    """
    parts: list[tuple[str, Setting]] = [("method", method)]
    if isinstance(method, Recipe):
        parts = [*zip(CHOICES, method.choices(), strict=True), *parts]
    for kind, part in parts:
        reason = part.needs_replies  # type: ignore[attr-defined]
        if not reason and not declares(type(part), "needs_replies", *READING[kind]):
            reason = UNDECLARED
        if reason:
            key, other = ("method.name", "method") if part is method else (f"method.{kind}", kind.replace("_", " "))
            problem = f"{reason}, but the server sees only sums with privacy.sums = 'secure'."
            raise SpecError(key, f"{problem} Use another {other}, or 'plain' sums.", part.name)


def _check_sites(spec: Experiment) -> None:
    """Refuse settings with which real sites would send more than sums, or send sums of an unknown size."""
    for key in ("client_test", "validation"):
        if (share := getattr(spec.evaluation, key)) is not None:
            problem = "the metrics of single sites are not sums. Remove this key, and give the server test samples."
            raise SpecError(f"evaluation.{key}", problem, share)
    if spec.privacy.largest is None:
        problem = "is required at real sites, because the server does not know their numbers of samples. Set a bound"
        raise SpecError("privacy.largest", f"{problem} that is not a secret.")
    if spec.privacy.dp is not None and spec.privacy.dp.budget is not None:
        problem = "needs each site's number of samples, but replies contain only their sum. Remove this key, and let "
        problem += "each site set 'budget' in its policy."
        raise SpecError("privacy.dp.budget", problem, spec.privacy.dp.budget)


def refuse_secure_sums(spec: Experiment) -> None:
    """Refuse secure sums in NVFlare's simulator, whose sites have no certificates.

    Raises:
        SpecError: The spec sets ``privacy.sums`` to "secure".
    """
    if spec.privacy.sums == "secure":
        problem = (
            "needs certificates, which NVFlare's simulator does not have. Use the engine 'local', or deploy the job."
        )
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
        raise SpecError(
            "privacy.simulate_masks",
            f"has no effect with the engine {engine!r}. Use the engine 'local', or remove this key.",
            True,
        )
