"""Check before the first round that secure sums (``privacy.sums``) are possible in a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.federation.allowed import declares
from fedstrata.federation.communication.codecs import Communication, PowerSGD, Uncompressed
from fedstrata.federation.engine import Engine, FederationConfig
from fedstrata.federation.federation import Listener
from fedstrata.federation.secure.factors import with_codec
from fedstrata.federation.settings import Privacy
from fedstrata.methods.base import READING, Method
from fedstrata.methods.recipe import CHOICES, Recipe
from fedstrata.spec.experiment import Experiment

UNDECLARED = "does not declare that the server needs only sums of replies (needs_replies)"


def check_secure_sums(spec: Experiment, config: FederationConfig, held: HeldOut) -> None:
    """Check that the method, the model and the settings allow ``privacy.sums = "secure"``.

    Raises:
        SpecError: The server needs individual replies, or secure sums are not implemented for a setting.
        ExtraMissingError: The extra ``secure`` is not installed.
    """
    from fedstrata.federation.secure import protocol

    training, evaluation, privacy = config.training, spec.evaluation, spec.privacy
    if config.sizes is None:
        _check_sites(spec)
    check_replies(spec.method)
    single = "the server does not see individual updates with privacy.sums = 'secure'"
    refusals: list[tuple[bool, str, Any, str]] = [
        (spec.attack is not None, "attack", getattr(spec.attack, "name", ""), f"{single}. Remove the section."),
        (evaluation.weight_diversity, "evaluation.weight_diversity", True, f"{single}. Remove the setting."),
        (
            held.own_test is not None and config.sizes is not None,
            "evaluation",
            ...,
            "metrics of individual clients are not sums, and the server sees only sums. Remove client_test.",
        ),
    ]
    for refused, key, value, problem in refusals:
        if refused:
            raise SpecError(key, problem, value)
    _check_codecs(spec.communication)
    invited = spec.method.most_summed(config)
    least = max(protocol.FEWEST, privacy.parties)
    if not least <= invited <= protocol.MOST_SITES or config.clients < least:
        problem = f"a secure sum needs {least} to {protocol.MOST_SITES} clients per round. Use a number in this range."
        everyone = invited != training.invited(config.clients)
        raise SpecError("partition.clients" if everyone else "training.clients_per_round", problem, invited)
    forms = spec.method.forms(config)
    if not forms:
        problem = f"{UNDECLARED}. Use another method, or privacy.sums = 'plain'."
        raise SpecError("method.name", problem, spec.method.name)
    with_codec(forms, spec.communication.up)


def _check_codecs(communication: Communication) -> None:
    """Check that the codecs of requests and replies support secure sums.

    Raises:
        SpecError: A codec is not supported.
    """
    up, down = communication.up, communication.down
    if not isinstance(down, Uncompressed):
        problem = (
            "clients have different versions of the model, but a secure sum needs the same request for all clients"
        )
        raise SpecError("communication.down", f"{problem}. Use communication.down = 'none'.", down.name)
    if isinstance(up, PowerSGD):
        for key, only in (("factors", "float32"), ("start", 1)):
            if (value := getattr(up, key)) != only:
                problem = f"is not supported with privacy.sums = 'secure'. Use {key} = {only!r}."
                raise SpecError(f"communication.up.{key}", problem, value)
    elif not isinstance(up, Uncompressed):
        problem = "is not possible with secure sums, because a sum of encoded updates cannot be decoded"
        raise SpecError("communication.up", f"{problem}. Use communication.up = 'powersgd' or 'none'.", up.name)


def with_parties(method: Method, config: FederationConfig) -> FederationConfig:
    """Return the settings, with ``privacy.parties`` set to the number of clients that a sum needs.

    If the clients add the noise, this number must be the same in all rounds, because it determines each client's share
    of the noise.

    Raises:
        ExtraMissingError: The extra ``secure`` is not installed.
    """
    privacy = config.privacy
    if privacy.clients is None or privacy.clients.noise_from == "server":
        return config
    from fedstrata.federation.secure import protocol

    parties = max(privacy.parties, protocol.default_threshold(method.most_summed(config)))
    return replace(config, privacy=privacy.model_copy(update={"parties": parties}))


def check_replies(method: Method) -> None:
    """Check that a method, with its settings, needs only sums of replies.

    Raises:
        SpecError: The server needs individual replies. The message gives the reason.
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
            problem = f"{reason}, but with privacy.sums = 'secure' the server sees only sums."
            raise SpecError(key, f"{problem} Use another {other}, or privacy.sums = 'plain'.", part.name)


def _check_sites(spec: Experiment) -> None:
    """Raise ``SpecError`` if sites would send more than sums, or if the summed numbers do not have a known bound."""
    for key in ("client_test", "validation"):
        if (share := getattr(spec.evaluation, key)) is not None:
            problem = (
                "would disclose metrics of individual sites, but the server may see only sums. Remove the setting, "
            )
            problem += "and give the server test samples."
            raise SpecError(f"evaluation.{key}", problem, share)
    if spec.privacy.largest is None and spec.privacy.clients is None:
        problem = "is required, because the server does not know the sites' numbers of samples"
        raise SpecError("privacy.largest", f"{problem}. Set a public upper bound.")
    if spec.privacy.dp is not None and spec.privacy.dp.budget is not None:
        problem = "needs each site's number of samples, but the server learns only the sum of these numbers. Remove "
        problem += "the setting, and let each site set 'budget' in its policy."
        raise SpecError("privacy.dp.budget", problem, spec.privacy.dp.budget)


def refuse_secure_sums(spec: Experiment) -> None:
    """Raise an error for secure sums in NVFlare's simulator, in which sites do not have certificates.

    Raises:
        SpecError: The spec sets ``privacy.sums`` to "secure".
    """
    if spec.privacy.sums == "secure":
        problem = (
            "needs certificates, which NVFlare's simulator does not have. Use the engine 'local', or deploy the job."
        )
        raise SpecError("privacy.sums", problem, spec.privacy.sums)


def check_secure_run(privacy: Privacy, engine: str | Engine, listener: Listener | None) -> None:
    """Check that a run with secure sums has a suitable engine and listener.

    Args:
        privacy: The spec's section ``privacy``.
        engine: The engine, or its name.
        listener: An optional function that is called with the clients' replies.

    Raises:
        SpecError: The engine cannot simulate masks, or a listener needs individual replies.
    """
    if listener is not None:
        problem = (
            "a listener, such as an audit, needs each client's reply. Use privacy.sums = 'plain', or remove the "
            "listener."
        )
        raise SpecError("privacy.sums", problem, privacy.sums)
    if privacy.simulate_masks and isinstance(engine, str) and engine != "local":
        raise SpecError(
            "privacy.simulate_masks",
            f"has no effect with the engine {engine!r}. Use the engine 'local', or remove the setting.",
            True,
        )
