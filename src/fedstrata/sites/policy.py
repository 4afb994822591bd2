"""Read a site's limits on jobs from ``policy.toml`` in the site's folder, and check jobs against these limits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedstrata.base.config import Setting
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.federation.settings import Privacy
from fedstrata.runs.dp_record import OUTSIDE
from fedstrata.sites.disclosure import UNDECLARED, Declaration
from fedstrata.sites.settings import read_setting
from fedstrata.spec.experiment import line_of

_EXAMPLES = {"methods": "[]", "budget": "8.0", "peers": "[]"}
"""Example values for keys without a default. A new policy file contains these examples in comments."""

FILE = Path("local") / "policy.toml"
"""The policy's file in a site's folder. The file is never part of a job."""


class RuleError(FedstrataError):
    """An error that a site raises to refuse a job or a request that exceeds one of the site's limits.

    Args:
        rule: The name of the limit, such as a key of ``Policy``.
        reason: A sentence that says what the site refuses and what the site accepts.
    """

    def __init__(self, rule: str, reason: str) -> None:
        self.rule, self.reason = rule, reason
        super().__init__(f"refused by the rule {rule!r}: {reason}")

    @property
    def for_good(self) -> bool:
        """Whether the site will refuse all requests until the job ends. The policy does not change during a job."""
        return self.rule.startswith("policy.")

    def __reduce__(self) -> tuple[type[RuleError], tuple[str, str]]:
        return RuleError, (self.rule, self.reason)


def _fingerprint(text: str) -> str:
    digits = text.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ValueError("must be a SHA-256 hash (64 hexadecimal digits)")
    return digits


Fingerprint = Annotated[str, AfterValidator(_fingerprint)]
"""The fingerprint of a certificate, in hexadecimal digits. Colons and capital letters, as OpenSSL writes them, are also
accepted."""


class Policy(Setting):
    """The limits that a site sets on jobs.

    Args:
        jobs: The jobs that may run. ``approved``: only jobs with a hash in the key ``approved``. ``within-policy``:
            every job that the other limits allow.
        approved: Hashes of specs, from the output of ``fedstrata asks``. ``fedstrata approve`` adds a hash.
        methods: Names of the methods that may run. Default: all methods that declare their requests.
        min_samples: The minimum number of samples from which each sent value is computed. Such a value is an update, a
            prototype, a count, or a gradient for a batch of Stratify. A spec may require more samples.
        below: The behaviour of a client that has fewer than ``min_samples`` samples in a batch of Stratify.
            ``hold-back``: the client uses these samples in a later batch. ``refuse``: the client does not answer.
            Other requests are never answered if they concern fewer than ``min_samples`` samples.
        rounds: The largest number of rounds of a job.
        exchanges: The largest number of request messages that the site answers for a job.
        megabytes: The largest total size of all answers to a job, in megabytes.
        starts: The largest number of times that a job may start or resume. After each start, a job can repeat the
            requests since its last checkpoint.
        surveys: The site sends at most this many different statistics of its data to jobs that are not
            approved. A spec with another seed holds out different samples for tests. Two answers can therefore differ
            by a single sample and reveal this sample. The limit also holds for the data descriptions (``[data]``)
            that jobs try at the site. Failed requests are also counted, because errors reveal something about the data.
        masking: Whether labels and their counts must be masked before they leave the site.
        ldp: Whether numbers of samples may leave the site only with local differential privacy.
        dp: The smallest noise (``privacy.dp.noise``) that a job may set. With 0, jobs do not need differential privacy,
            except if ``budget`` is set.
        outside_dp: Names of the values to which a job with differential privacy need not add noise. The names are
            ``sizes``, ``normalization``, ``imputation``, ``labels`` and ``evaluation``. The list has an effect only if
            the site requires differential privacy.
        budget: The largest ε of differential privacy that all jobs together may spend. If the next round would exceed
            this budget, the site stops answering. Default: no limit.
        delta: The δ for which ``budget`` holds.
        relay: The route of a model that clients train one after another. ``direct``: the model goes from site to site,
            so that the server sees only the final model. ``server``: the server may see every intermediate model.
        client_noise: The smallest client noise that a job may set (``privacy.clients.noise`` with ``noise_from =
            "sites"``). With 0, jobs do not need this noise.
        colluding: The smallest number of colluding clients (``privacy.clients.colluding``) that a job may set if its
            clients add noise.
        sums: The updates of this site that the server may see. ``secure``: only secure sums, so the site refuses jobs
            with ``privacy.sums = "plain"``. ``plain``: jobs may use plain or secure sums.
        parties: The smallest number of sites that must contribute to a secure sum, at least 3.
        peers: The certificate fingerprints of the other sites in secure sums, from the output of ``fedstrata check``.
            Ask the sites, and not the server, for the fingerprints. Default: every site with a certificate
            of the federation.
    """

    jobs: Literal["approved", "within-policy"] = "approved"
    approved: list[str] = []
    methods: list[str] | None = None
    min_samples: PositiveInt = 5
    below: Literal["hold-back", "refuse"] = "hold-back"
    rounds: PositiveInt = 1000
    exchanges: PositiveInt = 1_000_000
    megabytes: PositiveFloat = 100_000.0
    starts: PositiveInt = 20
    surveys: PositiveInt = 1
    masking: bool = False
    ldp: bool = False
    dp: NonNegativeFloat = 0.0
    outside_dp: list[Literal["sizes", "normalization", "imputation", "labels", "evaluation"]] = ["sizes"]
    budget: PositiveFloat | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    relay: Literal["direct", "server"] = "direct"
    client_noise: NonNegativeFloat = 0.0
    colluding: NonNegativeInt = 0
    sums: Literal["plain", "secure"] = "plain"
    parties: Annotated[int, Field(ge=3)] = 3
    peers: list[Fingerprint] | None = None

    def check(self, asked: Declaration) -> None:
        """Check a job against the policy, before the site reads any data.

        Args:
            asked: The declaration of everything that the job may request.

        Raises:
            RuleError: The job is refused. The message gives the limit, the job's value and the accepted values.
        """
        if self.jobs == "approved" and asked.job not in self.approved:
            raise RuleError("policy.approved", f"job {asked.job} is not approved. To approve it, {_remedy(asked.job)}.")
        if self.methods is not None and asked.method not in self.methods:
            accepted = ", ".join(self.methods) or "none"
            raise RuleError(
                "policy.methods", f"this site does not accept the method {asked.method!r}. Use one of: {accepted}"
            )
        if asked.allowed is None:
            raise RuleError("declared", f"the method {asked.method!r} {UNDECLARED}.")
        if asked.rounds > self.rounds:
            raise RuleError(
                "policy.rounds",
                f"the job has {asked.rounds} rounds, but this site accepts at most {self.rounds}",
            )
        least = self.least(asked.privacy)
        for allowed in asked.allowed:
            if limit := allowed.limit_below(least):
                problem = (
                    f"the reply to {allowed.label} {limit.reason}, but this site requires at least {least.min_samples}"
                )
                raise RuleError("policy.min_samples", problem)
        if asked.extremes and self.min_samples > 1:
            problem = (
                "data.normalize = 'unit' discloses the smallest and largest values, which belong to single samples"
            )
            accepted = "Use 'standard' or 'none', or set data.shift and data.scale."
            raise RuleError("policy.min_samples", f"{problem}. {accepted}")
        if self.requires_dp:
            self._check_dp(asked)
        for rule, fact, what, accepted in (
            ("masking", "labels", "labels", "Use a job that masks labels and does not evaluate at the sites."),
            (
                "ldp",
                "sizes",
                "numbers of samples",
                "Use a method that reports them with local differential privacy.",
            ),
        ):
            if getattr(self, rule) and fact in asked.discloses:
                by = [each.label for each in asked.allowed if fact in each.rule.discloses]
                by.append("the survey of the sites' data")
                raise RuleError(
                    f"policy.{rule}", f"this site keeps {what} private, but {by[0]} discloses them. {accepted}"
                )
        self._check_sums(asked.privacy)
        self._check_client_noise(asked.privacy)

    def _check_sums(self, privacy: Privacy) -> None:
        """Raise an error if the server would see single updates, or sums over fewer sites than this site requires."""
        if privacy.sums == "plain":
            if self.sums == "secure":
                problem = "the server would see individual updates, but this site accepts only privacy.sums = 'secure'"
                raise RuleError("policy.sums", problem)
        elif privacy.parties < self.parties:
            problem = f"a sum may have as few as {privacy.parties} sites, but this site requires {self.parties} or more"
            raise RuleError("policy.parties", f"{problem}. Set privacy.parties = {self.parties}")

    def _check_client_noise(self, privacy: Privacy) -> None:
        """Raise an error if sites add less noise to their updates than this site requires."""
        dp = privacy.clients
        if dp is not None and dp.noise_from == "server":
            problem = "the server computes its noise from the spec's seed, so this noise does not protect this site"
            raise RuleError("policy.client_noise", f"{problem}. Set privacy.clients.noise_from = 'sites'")
        noise, colluding = (0.0, None) if dp is None else (dp.noise, dp.colluding)
        if noise < self.client_noise:
            required = f"privacy.clients.noise = {self.client_noise:g} or more, with noise_from = 'sites'"
            raise RuleError("policy.client_noise", f"this site requires {required}. The noise of the job is {noise:g}")
        if colluding is not None and colluding < self.colluding:
            problem = f"this site requires privacy.clients.colluding = {self.colluding} or more"
            raise RuleError("policy.colluding", f"{problem}. The job has colluding = {colluding}")

    @property
    def requires_dp(self) -> bool:
        """Whether the site accepts only jobs with differential privacy of samples (``privacy.dp``)."""
        return self.dp > 0 or self.budget is not None

    def _check_dp(self, asked: Declaration) -> None:
        """Raise an error if a job adds too little noise, or sends values that the site does not allow without noise."""
        dp = asked.privacy.dp
        accepted = f"Set privacy.dp with a noise of at least {self.dp:g}." if self.dp else "Set privacy.dp."
        if dp is None:
            raise RuleError("policy.dp", f"this site requires differential privacy of samples. {accepted}")
        if dp.noise < self.dp:
            raise RuleError("policy.dp", f"privacy.dp.noise = {dp.noise:g} is too small for this site. {accepted}")
        if others := [name for name in asked.outside if name not in self.outside_dp]:
            raise RuleError("policy.outside_dp", self._outside(others))

    def check_evaluation(self) -> None:
        """Raise an error if this site requires differential privacy and therefore forbids evaluations on its samples.

        Raises:
            RuleError: ``outside_dp`` does not allow evaluations.
        """
        if self.requires_dp and "evaluation" not in self.outside_dp:
            raise RuleError("policy.outside_dp", self._outside(["evaluation"]))

    def _outside(self, names: list[str]) -> str:
        values = " and ".join(f"{OUTSIDE[name]} ({name!r})" for name in names)
        allowed = ", ".join(self.outside_dp) or "none"
        return f"{values} would be sent without noise. This site allows this only for: {allowed}"

    def limit(self, job: str, answer: object, before: Collection[object], topic: str) -> None:
        """Raise an error if a reply about the data is new, and ``surveys`` different replies were already sent.

        Args:
            job: The hash of the job.
            answer: The reply, or a key that identifies the reply.
            before: The earlier replies to all jobs. The site may send these replies again.
            topic: A description of the replies, for the error message.

        Raises:
            RuleError: The limit is reached, and the job is not approved.
        """
        if answer not in before and len(before) >= self.surveys and job not in self.approved:
            problem = (
                f"other jobs already learned {topic}. This site answers at most {self.surveys} requests of this kind"
            )
            raise RuleError("policy.surveys", f"{problem}. To approve this job nevertheless, {_remedy(job)}.")

    def check_counts(self, job: str, counts: Iterable[Tensor], least: int) -> None:
        """Raise an error if a category, a target or a value occurs at least once, but fewer than ``least`` times.

        Args:
            job: The hash of the job.
            counts: How often each category (or value) of a column occurs, or how often each target occurs.
            least: The minimum count that may leave the site.

        Raises:
            RuleError: A count is too small, and the job is not approved.
        """
        if job not in self.approved and any(((each > 0) & (each < least)).any() for each in counts):
            problem = (
                f"this site would send a count below {least}. Sites send counts of categories, of targets (for 'bins') "
                "and of values (for 'median' or 'most-frequent')"
            )
            accepted = "Use fewer categories, a larger step, task.edges, impute = 'mean' or 'constant', or "
            accepted += f"{_remedy(job)}."
            raise RuleError("policy.min_samples", f"{problem}. {accepted}")

    def least(self, privacy: Privacy) -> Privacy:
        """Return ``privacy``. If the policy requires more samples, use the policy's ``min_samples`` and ``below``.

        Args:
            privacy: The privacy settings of the spec.
        """
        if self.min_samples <= privacy.min_samples:
            return privacy
        return privacy.model_copy(update={"min_samples": self.min_samples, "below": self.below})

    @classmethod
    def read(cls, root: Path) -> Policy:
        """Read the policy from a site's folder, or return the defaults if the folder has no policy file.

        Raises:
            SpecError: The file is not TOML, a key is unknown or a value is wrong. The message gives the line.
        """
        return read_setting(cls, root / FILE, "policy") if (root / FILE).exists() else cls()

    def to_toml(self) -> str:
        """Return the text of the policy's file, with a comment about each key."""
        from fedstrata.spec.reference import rows

        meanings = {key: meaning.replace("``", "'") for key, _, _, meaning in rows(Policy)}
        lines = ["# The limits of this site on jobs. The site may change any line; the file is read when a job begins."]
        for key, value in self.model_dump().items():
            comment = textwrap.fill(meanings[key], 100, initial_indent="# ", subsequent_indent="# ")
            setting = f"# {key} = {_EXAMPLES[key]}" if value is None else tomli_w.dumps({key: value}).strip()
            lines.append(f"{comment}\n{setting}")
        return "\n\n".join(lines) + "\n"


def _remedy(job: str) -> str:
    return f"run 'fedstrata approve {job} --kit DIR' at the site"


def approve(kit: Path, job: str) -> bool:
    """Add a job to the approved jobs of a site's policy.

    Args:
        kit: The site's folder.
        job: The hash of the job.

    Returns:
        True if the job was not approved before.

    Raises:
        SpecError: The folder is not a site's folder, or its policy cannot be read.
    """
    if not (kit / FILE.parent).is_dir():
        problem = (
            f"is not the folder of a site, because it does not contain {FILE.parent}/. Give a site's folder "
            "from 'fedstrata deploy'."
        )
        raise SpecError("--kit", problem, str(kit))
    policy = Policy.read(kit)
    if job in policy.approved:
        return False
    path = kit / FILE
    text = path.read_text(encoding="utf-8") if path.exists() else policy.to_toml()
    path.write_text(_with_approved(text.splitlines(), [*policy.approved, job]), encoding="utf-8")
    return True


def _with_approved(lines: list[str], approved: list[str]) -> str:
    """Return the text of the policy file with a new list of approved jobs. The rest of the text does not change."""
    text = "\n".join(lines)
    begin = line_of(text, "approved")
    new = tomli_w.dumps({"approved": approved}).strip()
    if not begin:
        return f"{text}\n\n{new}\n"
    end = begin
    while end < len(lines) and "]" not in "".join(lines[begin - 1 : end]):
        end += 1
    return "\n".join([*lines[: begin - 1], new, *lines[end:]]) + "\n"


def require_hash(text: str) -> str:
    """Return a string unchanged if it looks like the hash of a spec. Otherwise, raise an error.

    Raises:
        SpecError: The string is not a hash.
    """
    if not re.fullmatch("[0-9a-f]{16}", text):
        problem = "is neither a spec nor a hash. Give the spec file, or the 16 digits that 'fedstrata asks' prints."
        raise SpecError("job", problem, text)
    return text
