"""Faults made by hand in lines that decide results, and the tests that must notice each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        label: What is wrong with it.
        file: Below ``src/fedstrata``.
        old: What stands there, once.
        new: What stands there instead.
        tests: Those that must notice, below ``tests``.
    """

    label: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, *tests: str) -> _File:
    return _File(file, tests)


@dataclass(frozen=True)
class _File:
    file: str
    tests: tuple[str, ...]

    def __call__(self, label: str, old: str, new: str, *tests: str) -> Mutant:
        return Mutant(label, self.file, old, new, tests or self.tests)


ring = _of("federation/secure/ring.py", "federation/secure/test_ring.py")
shamir = _of("federation/secure/shamir.py", "federation/secure/test_shamir.py")
primitives = _of("federation/secure/primitives.py", "federation/secure/test_protocol.py")
protocol = _of("federation/secure/protocol.py", "federation/secure/test_protocol.py", "hostile/test_secure_sums.py")
trust = _of("federation/secure/certificates.py", "federation/secure/test_protocol.py")
site = _of("federation/secure/site.py", "federation/secure/test_protocol.py", "hostile/test_secure_sums.py")
SECURE = "integration/test_secure_sums.py"
CODECS = "integration/test_secure_codecs.py"
BATCHES = "sites/test_secure_batches_at_sites.py"
FORMS = "federation/secure/test_fit.py"
factors = _of("federation/secure/factors.py", CODECS)
secure_fit = _of("federation/secure/fit.py", FORMS, "integration/test_secure_sums.py")
simulated = _of("federation/secure/simulated.py", "integration/test_secure_sums.py")
masked = _of("clients/handlers/masked.py", "integration/test_secure_sums.py")
secure_checks = _of("runs/secure_checks.py", "integration/test_secure_sums.py")
intervals = _of("audits/intervals.py", "audits/test_intervals.py")
membership = _of("audits/membership.py", "audits/test_membership.py")
server_view = _of("audits/server_view.py", "audits/test_updates.py")
planting = _of("audits/planting.py", "audits/test_canaries.py")
client_sum = _of("aggregation/private.py", "aggregation/test_private.py")
client_round = _of("methods/private.py", "methods/test_private.py")
client_accountant = _of("runs/client_accountant.py", "runs/test_client_accountant.py", "methods/test_private.py")
client_checks = _of("runs/client_checks.py", "runs/test_client_checks.py")
shares = _of("federation/secure/noisy.py", "federation/secure/test_noisy.py")
SHARES_ROUND = "methods/test_noise_shares.py"
SITE_SHARES = "sites/test_noise_shares_at_sites.py"
SKELLAM = "runs/test_skellam.py"
secure_site = _of("sites/secure_site.py", "sites/test_secure_sums_at_sites.py")
secure_server = _of("sites/secure_sums.py", "sites/test_secure_sums_at_sites.py")
declared_sums = _of("federation/secure/allowed.py", "sites/test_secure_sums_at_sites.py")
opening = _of("federation/secure/server.py", "federation/secure/test_protocol.py", "hostile/test_secure_sums.py")
scaffold = _of("objectives/scaffold.py", "methods/test_scaffold.py")
feddyn = _of("objectives/feddyn.py", "methods/test_feddyn.py")
prox = _of("objectives/fedprox.py", "objectives/test_fedprox.py")
moon = _of("objectives/moon.py", "objectives/test_moon.py", "objectives/test_untrained.py")
calibrated = _of("objectives/calibrated.py", "objectives/test_calibrated.py")
rebafl = _of("objectives/rebafl.py", "objectives/test_rebafl.py", "methods/test_rebafl.py")
prototypes = _of("objectives/rebafl.py", "objectives/test_prototypes.py", "methods/test_rebafl.py")
aggregation = _of("aggregation/base.py", "aggregation/test_base.py")
sharpness = _of("objectives/sharpness.py", "objectives/test_sharpness.py")
displaced = _of("clients/training/displaced.py", "objectives/test_sharpness.py")
graph = _of("sampling/graph.py", "sampling/test_graph.py")
entropy = _of("sampling/entropy.py", "sampling/test_entropy.py")
memory = _of("aggregation/memory.py", "aggregation/test_memory.py")
scaled = _of("aggregation/scaled.py", "aggregation/test_scaled.py")
ccvr = _of("methods/ccvr.py", "methods/test_ccvr.py")
moments = _of("clients/handlers/moments.py", "methods/test_ccvr.py")
server = _of("aggregation/optimizers.py", "aggregation/test_optimizers.py")
sgd = _of("clients/training/steps.py", "clients/test_sgd.py", "clients/test_local.py")
local = _of("clients/training/local.py", "clients/test_local.py")
settings = _of("federation/settings.py", "spec/test_experiment.py", "clients/test_local.py")
augmenting = _of("clients/training/augmenting.py", "clients/test_augmenting.py")
crops = _of("data/augmentation.py", "data/test_augmentation.py")
steps = _of("clients/training/steps.py", "clients/test_local_optimizers.py")
optimised = _of("clients/training/local.py", "clients/test_local_optimizers.py")
warmup = _of("federation/settings.py", "clients/test_local_optimizers.py")
behind = _of("clients/client.py", "clients/test_minimum.py")
limits = _of("federation/allowed.py", "clients/test_minimum.py")
randomness = _of("base/rng.py", "base/test_rng.py")
allocation = _of("sampling/allocation.py", "sampling/test_allocation.py")
stratified = _of("sampling/stratified.py", "sampling/test_stratified.py", "methods/test_fedstas.py")
weighted = _of("sampling/weighted.py", "sampling/test_weighted.py")
sizes = _of("sampling/client_sizes.py", "sampling/test_client_sizes.py")
ldp = _of("sampling/client_sizes.py", "sampling/test_client_sizes.py", "methods/test_fedstas.py")
fedsampling = _of("sampling/fedsampling.py", "sampling/test_fedsampling.py", "methods/test_fedsampling.py")
choice = _of("sampling/power_of_choice.py", "sampling/test_power_of_choice.py")
uniform = _of("sampling/base.py", "sampling/test_weighted.py", "methods/test_fedavg.py")
batch = _of("stratify/batch.py", "stratify/test_batch.py")
enrolled = _of("sampling/label_counts.py", "stratify/test_messages.py")
client_batch = _of("stratify/client_batch.py", "stratify/test_batch.py")
schedule = _of("stratify/schedule.py", "stratify/test_schedule.py")
single = _of("stratify/single.py", "stratify/test_single.py")
selection = _of("stratify/selection.py", "stratify/test_selection.py")
label_schedule = _of("stratify/schedule.py", "stratify/test_label_weights.py")
label_client = _of("stratify/client_batch.py", "stratify/test_label_weights.py")
label_batch = _of("stratify/batch.py", "stratify/test_label_weights.py")
hybrid = _of("stratify/hybrid.py", "stratify/test_batch.py", "stratify/test_single.py")
norm = _of("models/batchnorm.py", "models/test_batchnorm.py")
fedtan = _of("clients/handlers/fedtan.py", "clients/test_fedtan.py")
averaged = _of("models/averagednorm.py", "clients/test_fedtan.py", "models/test_batchnorm.py")
fit = _of(
    "clients/handlers/fit.py", "clients/test_fit.py", "clients/test_local.py", "integration/test_private_sizes.py"
)
exchanges = _of("federation/exchanges.py", "federation/test_federation.py")
federation = _of("federation/federation.py", "federation/test_federation.py")
relay = _of("federation/engine.py", "federation/test_engine.py", "federation/test_federation.py")
checks = _of("federation/reply_checks.py", "federation/test_federation.py")
messages = _of("federation/messages.py", "federation/test_messages.py", "federation/test_federation.py")
there = _of("federation/availability.py", "federation/test_availability.py")
patterns = _of("federation/availability_patterns.py", "federation/test_availability_patterns.py")
correlated = _of("federation/availability_correlated.py", "federation/test_availability_correlated.py")
engine = _of(
    "engines/local.py", "engines/test_local.py", "federation/test_federation.py", "engines/test_conformance.py"
)
store = _of("clients/client.py", "clients/test_store.py")
checkpoint = _of("runs/checkpoint.py", "runs/test_checkpoint.py")
identity = _of("runs/identity.py", "runs/test_identity.py")
logs = _of("base/jsonl.py", "base/test_jsonl.py", "runs/test_identity.py")
folder = _of("runs/run_folder.py", "runs/test_run_folder.py", "experiments/test_run.py")
recipe = _of("methods/recipe.py", "methods/test_recipe.py")
sfl = _of("methods/sfl.py", "methods/test_sfl.py")
head = _of("methods/head_tuning.py", "methods/test_head_tuning.py", "methods/test_fedavg_ft.py")
predictions = _of("evaluation/predictions.py", "evaluation/test_predictions.py", "clients/test_local.py")
division = _of("data/partitions/schemes.py", "data/test_partitions.py")
data = _of("data/arrays.py", "data/test_dataset.py")
scaled_inputs = _of("data/normalisation.py", "data/test_dataset.py")
fitting = _of("data/fitting.py", "data/test_fitting.py")
sites_data = _of("sites/data_schema.py", "sites/test_sites.py")
targets = _of("data/fitting.py", "sites/test_regression_at_sites.py")
rounded_targets = _of("data/tasks/regression.py", "sites/test_regression_at_sites.py")
told_targets = _of("sites/disclosure.py", "sites/test_regression_at_sites.py")
loop = _of("runs/simulation.py", "runs/test_simulation.py", "experiments/test_run.py")
ledger = _of("sites/ledger.py", "sites/test_ledger.py")
encoded = _of("clients/handlers/encoded.py", "federation/test_compression.py")
compression = _of("federation/communication/compression.py", "federation/test_compression.py")
codecs = _of("federation/communication/codecs.py", "federation/test_codecs.py", "federation/test_compression.py")
clock = _of("federation/clock.py", "federation/test_network.py", "federation/test_availability.py")
holdouts = _of("evaluation/holdouts.py", "evaluation/test_holdouts.py")
metrics = _of("evaluation/metrics.py", "evaluation/test_metrics.py")
sums = _of("evaluation/sums.py", "evaluation/test_metrics.py", "evaluation/test_evaluator.py")
evaluator = _of("evaluation/evaluator.py", "evaluation/test_evaluator.py")
history = _of("evaluation/history.py", "evaluation/test_history.py")
loop_state = _of("runs/loop_state.py", "runs/test_loop_state.py")
callbacks = _of("spec/callbacks.py", "spec/test_callbacks.py")
clustered = _of("sampling/clustered.py", "sampling/test_clustered.py")
kmeans = _of("sampling/incremental_kmeans.py", "sampling/test_incremental_kmeans.py")
quantization = _of("sampling/sketches.py", "sampling/test_sketches.py")
roster = _of("stratify/roster.py", "stratify/test_roster.py", "stratify/test_batch.py", "stratify/test_single.py")
tags = _of("stratify/masking/prf.py", "stratify/masking/test_enrolment.py", "stratify/masking/test_key_store.py")
counting = _of("stratify/masking/counting.py", "stratify/masking/test_enrolment.py")
slots = _of("stratify/masking/slot_layout.py", "stratify/masking/test_slot_layout.py")
guard = _of("sites/guard.py", "sites/test_guard.py", "sites/test_policy.py")
members = _of("sites/members.py", "sites/test_members.py")
certificates = _of("sites/certificates.py", "sites/test_check.py")
provision = _of("sites/provision.py")
REQUESTS = "sites/test_certificate_requests.py"
predictor = _of("runs/predictor.py", "runs/test_predictor.py")
statistics = _of("reporting/statistics.py", "reporting/test_statistics.py", "papers/test_judging.py")
judging = _of("papers/judging.py", "papers/test_judging.py")
recommended = _of("papers/recommend/properties.py", "papers/recommend/test_properties.py")
rounds = _of("papers/recommend/rounds.py", "papers/recommend/test_properties.py")
advice = _of("papers/recommend/advice.py", "papers/recommend/test_advice.py")
board_ranks = _of("papers/board/ranks.py", "papers/board/test_ranks.py")
board_judging = _of("papers/board/judging.py", "papers/board/test_pages.py")
board_running = _of("papers/board/running.py", "papers/board/test_running.py")
tables = _of("reporting/tables.py", "reporting/test_tables.py")
fedssar = _of("sampling/fedssar.py", "sampling/test_fedssar.py", "methods/test_fedssar.py")
sketches = _of(
    "sampling/sketches.py", "sampling/test_fedssar.py", "methods/test_fedssar.py", "sampling/test_clustered.py"
)
sampled = _of("clients/handlers/sampling.py", "clients/test_sampling.py", "sampling/test_power_of_choice.py")
dealing = _of("data/partitions/assign.py", "data/test_assign.py", "data/test_partitions.py")
policy = _of("sites/policy.py", "sites/test_policy.py")
noise = _of("clients/training/private.py", "sites/test_private_at_sites.py")
draws = _of("clients/client.py", "sites/test_private_at_sites.py")
budget = _of("sites/privacy_budget.py", "sites/test_privacy_budget.py")
spending = _of("sites/site_server.py", "sites/test_private_at_sites.py")
once = _of("sites/idempotency.py", "sites/test_transport.py")
site_sums = _of("sites/sums.py", "sites/test_sites.py", "sites/test_patience.py")

MUTANTS = [
    secure_fit("weights are divided by the largest", "(numbers.weight.largest / by)", "(1.0 / by)"),
    secure_fit("equal weights", "each.weight.of(reply) / (each.weight.largest or 1)", "1.0"),
    secure_fit("the loss of all clients alike", "lambda reply: reply.seen, most)\n\n", "lambda reply: most, most)\n\n"),
    secure_fit(
        "models instead of updates", "reply.weights.params[name] - sent.params[name]", "reply.weights.params[name]"
    ),
    secure_fit("whole steps of noise", "most = self.steps * self.config.training.batch_size", "pass"),
    secure_fit("tokens count as samples", "lambda reply: reply.size,", "lambda reply: reply.samples,"),
    aggregation("the sum instead of the mean", "weights.params, sums.weight(self.share))", "weights.params)", FORMS),
    aggregation("buffers of one client", 'sums.of("buffers", sums.weight(self.share))', 'sums.of("buffers")', FORMS),
    scaffold("c by those in the sum", 'sums.of("delta_c", clients)', 'sums.of("delta_c", sums.clients)', FORMS),
    feddyn("the sum without α", "value - self.alpha / clients * updates", "value - 1 / clients * updates", FORMS),
    rebafl("means of all clients alike", 'table["means"] * table["samples"][:, None]', 'table["means"]', FORMS),
    rebafl(
        "forgotten prototypes",
        'updated(state, {"means": means, "samples": samples}, self.prototype_momentum), after',
        '{"means": means, "samples": samples}, after',
        FORMS,
    ),
    scaled("one step of each client", "total / length if length else math.inf", "total", FORMS),
    scaled("the sum of the squares", 'sums.number("square") / sums.clients', 'sums.number("square")', FORMS),
    simulated("late clients are no members", "set(asked) - federation.log.dropped", "set(reached)"),
    simulated("one answer too few", "if len(answers) < needed:", "if len(answers) < needed - 1:"),
    simulated("lost states", "engine.commit(answers)", "engine.commit([])"),
    simulated(
        "the end of a sum is not counted", "steps.append((protocol.Opened", "(steps.copy().append)((protocol.Opened"
    ),
    masked("a state without a sum", "member.pending, client.state = client.state, before", "pass"),
    masked(
        "another question for each round",
        "question_of(inner), words, enough",
        "question_of(inner)[:16], words, enough",
    ),
    factors("sums instead of means", "row / numbers.weight.largest}", "row}"),
    factors("a vector of one client", "self.ring.decode(words, 1)", "self.ring.decode(words * 2, 1)"),
    compression("a second sum over fewer clients", "second.ring, continues=True", "second.ring", CODECS),
    masked("an error without rounding", "second.remember(client, form.sent(words, second.reply))", "pass", CODECS),
    opening("a lost site between two sums", "elif self._only not in (None, self.contributors):", "elif False:"),
    site("another set than before", "same = current.only in (None, sorted(present))", "same = True"),
    site("a vote of any sum", "members, only=only), None", "members, only=only), self._last_vote"),
    site("sets that are not in the context", "else protocol.continued(question, only))", "else question)"),
    declared_sums("requests about samples are summed", "if inside.single:", "if False:", BATCHES),
    declared_sums("the order of inner requests", "order=None, together=False", "together=False", BATCHES),
    secure_checks("rounded factors", '(("factors", "float32"), ("start", 1))', '(("start", 1),)', CODECS),
    batch("a sum of two clients", "if len(samples) < least:", "if not samples:", SECURE),
    batch("lost clients are asked again", "if lost := set(samples) & federation.log.absent():", "if False:", SECURE),
    secure_checks(
        "a budget for secret sizes",
        "spec.privacy.dp is not None and spec.privacy.dp.budget is not None",
        "False",
        "sites/test_secure_sums_at_sites.py",
    ),
    secure_checks("every part", "        if reason:", "        if False:"),
    secure_checks(
        "parts that declare nothing",
        "if not reason and not declares(type(part)",
        "if False and not declares(type(part)",
    ),
    uniform("draws with replacement", 'if self.replacement and config.privacy.sums == "secure":', "if False:", SECURE),
    fedsampling("single answers", 'if self.reuse and config.privacy.sums == "secure":', "if False:", SECURE),
    masked(
        "a site sends a vector without masks",
        "if site is not None:",
        "if False:",
        "sites/test_secure_sums_at_sites.py",
    ),
    declared_sums("a question without a beginning", "lambda begin, _: begin is not None", "lambda begin, _: True"),
    secure_site("a question again after a restart", "self._answered_file.add(question)", "pass"),
    secure_site("a question again in another process", "if question in known:", "if False:"),
    secure_site("fewer parties than the spec", "max(privacy.parties, policy.parties)", "policy.parties"),
    secure_site("every peer", "peers=policy.peers", "peers=None"),
    secure_site("any threshold with colluding sites", "site.colluding = privacy.colluding", "pass", SITE_SHARES),
    secure_site("noise in any number of answers", "len(known) >= self._most", "False", SITE_SHARES),
    secure_site("a limit of one answer more", "len(known) >= self._most", "len(known) > self._most", SITE_SHARES),
    secure_server("a roster with too small a threshold", "colluding=privacy.colluding", "colluding=0", SITE_SHARES),
    spending("noise of real sites from the seed", " or privacy.clients is not None)", ")", SITE_SHARES),
    spending("a ledger without noise", ".ring.noise or None", ".ring.noise and None", SITE_SHARES),
    policy("noise of the server", 'dp.noise_from == "server":', "False:", SITE_SHARES),
    policy("less noise of clients", "if noise < self.client_noise:", "if False:", SITE_SHARES),
    policy("fewer colluding clients", "and colluding < self.colluding:", "and False:", SITE_SHARES),
    secure_site("no state after a sum", "store.put(client, member.pending)", "pass"),
    secure_server("a lost site stays in the roster", "and site in self._server.members:", "and False:"),
    secure_server("the news is not sent", "self._engine.messenger.acknowledge(site, opened)", "pass"),
    secure_server("a roster per sum", "if server is not None and server.roster", "if False and server.roster"),
    secure_checks("listeners", "if listener is not None:", "if False:"),
    ring("a sum wraps", "if self.noise else scale)", "if self.noise else scale + 1)"),
    ring("rounded to the nearest", "draw(-(-len(fixed) // 2)).view(np.uint32)[: len(fixed)]", "1 << 31"),
    ring("rounded down", "fixed += draw", "draw"),
    ring("clipped element by element", "unit = max(part.range, largest)", "unit = part.range"),
    ring("scaled in silence", "scaled += largest > part.range", "scaled += 0"),
    ring("infinity is sent", "if not math.isfinite(largest):", "if math.isnan(largest):"),
    ring("a count out of range is sent", "if not 0 <= counts[name] <= most:", "if not 0 <= counts[name]:"),
    ring("false counts are accepted", "if count > sites * self.counts[name]:", "if False:"),
    ring("the first vector is changed", "total = first.copy()", "total = first"),
    shamir("the secret is a share", "for holder in range(1, holders + 1):", "for holder in range(holders):"),
    shamir("one coefficient too few", "for _ in range(threshold - 1))", "for _ in range(threshold - 2))"),
    shamir("a smaller prime", "PRIME = 2**130 - 5", "PRIME = 2**127 - 1"),
    shamir("always the secret", "above = above * (at - other)", "above = above * (0 - other)"),
    primitives(
        "half of the seed",
        "HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)",
        "HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret[:8])",
    ),
    primitives("no salt", "HKDF(SHA256(), KEY_BYTES, salt, info)", "HKDF(SHA256(), KEY_BYTES, b'', info)"),
    primitives("parts run together", 'return b"%b%d:%b" % (kind, len(content), content)', "return kind + content"),
    primitives(
        "every signature is valid",
        "except (InvalidSignature, ValueError):\n        return False",
        "except (InvalidSignature, ValueError):\n        return True",
        "hostile/test_secure_sums.py",
    ),
    trust(
        "expired certificates",
        "if not read.not_valid_before_utc <= datetime.now(UTC) <= read.not_valid_after_utc:",
        "if datetime.now(UTC) < read.not_valid_before_utc:",
    ),
    trust("another name", "if common_name != name:", "if False:"),
    protocol("a majority is enough", "max(2 * sites // 3, ", "max(sites // 2, "),
    protocol("any number of colluding sites", "(sites + colluding) // 2)", "0)"),
    protocol(
        "the members are not in the context",
        "job, roster, members, exchange, question)",
        "job, roster, exchange, question)",
    ),
    protocol(
        "the question is not in the context",
        'digest("exchange", job, roster, members, exchange, question)',
        'digest("exchange", job, roster, members, exchange)',
    ),
    protocol(
        "whether there are enough samples is not signed",
        'statement("in", context, name, int(enough))',
        'statement("in", context, name)',
    ),
    protocol("weak keys", "if not all(map(primitives.agreeable,", "if False and not all(map(primitives.agreeable,"),
    protocol("keys twice", "names |= {owners[entry], package.name}", "pass"),
    site(
        "all after a set",
        'self._require("vote", current.voted is None, "the site has already voted in this exchange")\n'
        '        self._require("all"',
        'self._require("all"',
    ),
    site(
        "a set after all",
        'self._require("vote", current.voted is None, "the site has already voted in this exchange")\n'
        '        self._require("subset", set',
        'self._require("subset", set',
    ),
    site(
        "a set without t votes",
        'self._require("votes", len(votes) >= joined.roster.threshold,',
        'self._require("votes", len(votes) >= 1,',
    ),
    site("votes for another set", "name in current.voted and valid(", "True or valid("),
    site(
        "an exchange again",
        'self._require("exchange", number > joined.last,',
        'self._require("exchange", number >= joined.last,',
    ),
    site("a question again", "self.answered.add(question)", "pass"),
    site("a package again", "own.dealt = True", "pass"),
    site("statements are not checked", 'self._require("in", right,', 'self._require("in", True,'),
    site("too few parties", 'self._require("parties", enough >= self.parties,', 'self._require("parties", True,'),
    site("strangers", 'self._require("peers", not unknown,', 'self._require("peers", True,'),
    site("forgotten questions", "self.answered = set(answered)", "self.answered = set()"),
    site("both seeds", "for name in current.members if name not in chosen},", "for name in current.members},"),
    site("seeds stay", "joined.forget(current.number + 1)", "joined.forget(current.number)"),
    site(
        "a threshold of the server's choice",
        'self._require("threshold", threshold >= least,',
        'self._require("threshold", threshold >= 0,',
    ),
    site(
        "boxes of another roster",
        "return derive(agree(self._box_key, other.box_key), roster, public), content, public",
        "return derive(agree(self._box_key, other.box_key), b'', b''), content, b''",
    ),
    opening(
        "commitments are not checked",
        "!= package.commitment(\n                kind, self.number\n            ):",
        "== b'':",
    ),
    opening("one set of shares only", "MOST_TRIES = 1000", "MOST_TRIES = 1"),
    opening(
        "sets in lexicographic order", "yield tuple(generator.sample(holders, size))", "yield tuple(holders[:size])"
    ),
    opening("unsigned vectors", 'return "the signature of its vector is wrong"', 'return ""'),
    opening("the pair masks of lost sites stay", "total += protocol.pair_mask(", "protocol.pair_mask("),
    opening("liars are asked first again", "self._suspects.update(wrong)", "pass"),
    scaffold("K is one too many", "1 / (trained.steps * context.lr)", "1 / ((trained.steps + 1) * context.lr)"),
    scaffold("K is never 1", "if trained.steps == 0:", "if trained.steps <= 1:"),
    scaffold("the correction's sign", "c[name] - c_k[name] for name in c", "c_k[name] - c[name] for name in c"),
    scaffold("c by those who returned", "+ delta / clients", "+ delta / len(replies)"),
    scaffold("the client forgets c_k", "for name in new}}, new", "for name in new}}, c_k"),
    scaffold("Δc is c_k", "new[name] - c_k[name] for name in new", "new[name] for name in new"),
    feddyn("h's sign", "h[name] - self.alpha / clients", "h[name] + self.alpha / clients"),
    feddyn("the shift's sign", "w - h[name] / self.alpha", "w + h[name] / self.alpha"),
    feddyn("h by those who returned", "self.alpha / clients * (w", "self.alpha / len(replies) * (w"),
    feddyn("λ's sign at the client", "dual[n] - self.alpha * (w", "dual[n] + self.alpha * (w"),
    feddyn("λ added, not taken off", "context.start[name]) - dual[name]", "context.start[name]) + dual[name]"),
    prox("the pull's sign", "(w.detach() - context.start[name])", "(context.start[name] - w.detach())"),
    prox("half the pull", "self.mu * (w.detach()", "self.mu / 2 * (w.detach()"),
    moon("near and far", "(far - near) / temperature", "(near - far) / temperature"),
    moon("no temperature", "(far - near) / temperature", "(far - near) * temperature"),
    moon("who took no step keeps the global model", "if trained.steps == 0:", "if False:"),
    calibrated("ε the other way", "(1 - epsilon) * share + epsilon", "epsilon * share + (1 - epsilon)"),
    calibrated("FedLC's exponent", "** -0.25", "** -0.5"),
    calibrated("FedLC's sign", "torch.where(counts > 0, -margins", "torch.where(counts > 0, margins"),
    calibrated(
        "FedRS scales what is there",
        "torch.where(counts > 0, 1.0, self.alpha)",
        "torch.where(counts > 0, self.alpha, 1.0)",
    ),
    prototypes(
        "the first prototype is averaged with zeros",
        'torch.where(before["samples"][:, None] > 0, blended, new["means"])',
        "blended",
    ),
    prototypes("β weighs the new prototypes", "momentum * (before", "(1 - momentum) * (before"),
    rebafl(
        "sums without a moving average",
        "samples}, self.prototype_momentum), after",
        "samples}, 0.0), after",
        FORMS,
    ),
    rebafl("λ is one", "P[targets] + self.transfer * (features", "P[targets] + 1.0 * (features"),
    rebafl("deviation from the target", "(features - P[labels])", "(features - P[targets])"),
    rebafl("no second loss", "+ self.mu * second", "+ 0.0 * second"),
    prototypes("weights of prototypes", "sums += counts[:, None] * table", "sums += (counts[:, None] > 0) * table"),
    prototypes("theirs before one's own", 'known = new["samples"] > 0', 'known = before["samples"] <= 0'),
    prototypes(
        "a sum, no mean",
        '(sums / samples.clamp(min=1)[:, None]).float(), "samples": samples}\n    return',
        'sums.float(), "samples": samples}\n    return',
    ),
    aggregation(
        "draws do not count", "samples.astype(np.float64) * selection.draws[returned]", "samples.astype(np.float64)"
    ),
    aggregation("size counts twice", "if selection.stratum_samples is not None:", "if False:"),
    aggregation("all strata, also those of the lost", "sizes[~missing].sum()", "sizes.sum()"),
    aggregation("strata without a draw do not count", "missing &= np.bincount", "_ = np.bincount"),
    aggregation("no importance", "m * (selection.probability[returned] * chance)", "m"),
    aggregation("weights of buffers", "others, a / total)", "others, a)"),
    aggregation("the counters' mean", ".amax(dim=0)", ".amin(dim=0)"),
    memory("only clients that reply", "/ len(omega)", "/ len(replies)"),
    memory(
        "only updates of this round",
        'state["updates"] | updates_of(weights, replies), state["server"]',
        'updates_of(weights, replies), state["server"]',
    ),
    memory("old updates stay in the correction", "total.sub_(", "total.add_("),
    scaled("the plain mean of steps", "p * (p @ length) / np", "p * length.mean() / np"),
    scaled("momentum without its sum", "momentum**steps) / (1 - momentum)) /", "momentum**steps)) /"),
    scaled("the norm of the sum", "squared_norm(mean) + self.eps", "squared_norm(mean) * len(answers) + self.eps"),
    scaled("a short step", "max(1.0, square", "max(0.0, square"),
    scaled("the first model counts", 'weights.params if state["updates"] else {}', "weights.params"),
    memory("an echo a round short", "(a * (t - last[clients]))", "(a * (t - last[clients] - 1))"),
    memory("a mean over models, not over clients", "counts / counts.sum()", "np.ones(len(counts)) / len(counts)"),
    memory(
        "all clients start at the newest model", 'state["models"].get(int(state["last"][client]), weights)', "weights"
    ),
    ccvr(
        "the mean is not subtracted", "(second - n * torch.outer(mean, mean))", "(second - 0 * torch.outer(mean, mean))"
    ),
    ccvr("divided by n", "max(n - 1, 1)", "n"),
    ccvr("variances instead of deviations", "values.clamp(min=0).sqrt()", "values.clamp(min=0)"),
    moments("also classes with few samples", "samples < client", "samples < 0 * client"),
    memory("a cutoff a round late", "waited >= self.cutoff", "waited > self.cutoff"),
    server(
        "decay with the wrong sign",
        "torch._foreach_add_(total, weights, alpha=self.settings.weight_decay)",
        "torch._foreach_sub_(total, weights, alpha=self.settings.weight_decay)",
    ),
    server(
        "a velocity that never fades",
        "torch._foreach_mul_(self._first, self.settings.momentum)",
        "torch._foreach_mul_(self._first, 1.0)",
    ),
    server("yogi's sign", "torch.sign(v - square)", "torch.sign(square - v)"),
    server("τ inside the root", "(v.sqrt() + tau)", "(v + tau).sqrt()"),
    server("β₁ twice", "alpha=1 - beta1", "alpha=1 - beta2"),
    sgd(
        "decay before the clip",
        (
            "if self.training.clip is not None:\n"
            "            gradient = clipped(gradient, self.training.clip)\n"
            "        if self.training.weight_decay:\n"
            "            gradient = torch._foreach_add(gradient, params, alpha=self.training.weight_decay)"
        ),
        (
            "if self.training.weight_decay:\n"
            "            gradient = torch._foreach_add(gradient, params, alpha=self.training.weight_decay)\n"
            "        if self.training.clip is not None:\n"
            "            gradient = clipped(gradient, self.training.clip)"
        ),
    ),
    local(
        "a correction that is not clipped",
        "gradient = torch._foreach_add(gradient, [correction[name] for name in names])",
        "torch._foreach_add_(trained, [correction[name] for name in names], alpha=-context.lr)",
    ),
    sgd("short gradients grow", "max=1.0)", "max=1e9)"),
    sgd(
        "momentum is dampened",
        "torch._foreach_add_(self.velocity, gradient)",
        "torch._foreach_add_(self.velocity, gradient, alpha=1 - self.training.momentum)",
    ),
    steps("the rate of the last round", 'group["lr"] = lr', "pass"),
    steps(
        "a kept state changes in place",
        "return torch.empty_like(",
        "return value if value.dim() else torch.empty_like(",
    ),
    optimised(
        "parts of all sizes alike",
        "share = float(task.weights(y).sum()) / whole",
        "share = 1 / parts",
    ),
    optimised(
        "no state is kept",
        'steps.state() if training.optimizer_state == "keep" else None',
        "None",
    ),
    optimised("single samples are left over", "max(1, min(parts, n // 2)) if pairs else parts", "parts"),
    warmup("full already in the last round of the warm-up", "(self.warmup + 1)", "self.warmup"),
    behind(
        "one part counts",
        "training.local_steps * training.samples_per_step",
        "training.local_steps * training.batch_size",
    ),
    limits(
        "one part counts",
        "training.local_steps * training.samples_per_step",
        "training.local_steps * training.batch_size",
    ),
    settings("a round late", "t = round - 1", "t = round"),
    settings("half a cosine", "math.pi * min(t", "0.5 * math.pi * min(t"),
    augmenting("every step draws the same numbers", 'f"augment/{step}"', '"augment"'),
    augmenting("every client draws the same numbers", "round, client).integers", "round).integers"),
    crops("an edge is repeated", "last - (last - places.abs()).abs()", "places.clamp(0, last)"),
    crops("crops that never move down", "randint(-self.padding, self.padding + 1", "randint(-self.padding, 1"),
    local(
        "one batch for each epoch",
        "[*range(size, n, size), n]",
        "[size]",
    ),
    randomness("the client is no part of it", "{seed}|{purpose}|{round}|{client}", "{seed}|{purpose}|{round}|{round}"),
    randomness("the seed is no part of it", "{seed}|{purpose}|{round}|{client}", "0|{purpose}|{round}|{client}"),
    randomness("PyTorch's generator is left as it is", "torch.set_rng_state(state)", "pass"),
    allocation("Neyman without the spread", "weights = sizes * deviations", "weights = sizes * (deviations > 0)"),
    allocation("Neyman without the size", "weights = sizes * deviations", "weights = (sizes > 0) * deviations"),
    allocation("the smallest remainder", "np.argsort(-remainders", "np.argsort(remainders"),
    stratified(
        "K is no part of an update",
        "(np.float32(state.lr) * np.array(steps, dtype=np.float32))",
        "(np.float32(state.lr) * np.ones(len(steps), dtype=np.float32))",
        "sampling/test_updates.py",
        "methods/test_fedstas.py",
    ),
    stratified(
        "drawn alike within a stratum",
        "p = norms[members] / total if total > 0 else",
        "p = norms[members] / total if total < 0 else",
    ),
    stratified("probabilities of the whole", "probability[members] = p\n", "probability[members] = p / len(sizes)\n"),
    weighted("nobody is certain", "remaining * sizes >= sizes[~", "remaining * sizes > 2 * sizes[~"),
    allocation(
        "the first pointer",
        "generator.integers(total) + total * np.arange(count)",
        "total * np.arange(count)",
        "sampling/test_weighted.py",
    ),
    sizes(
        "LDP's α", "return -math.expm1(-epsilon) / (1 + (bound - 2)", "return -math.expm1(-epsilon) / (1 + (bound - 1)"
    ),
    sizes("LDP's estimate", "(1 - alpha) * bound * clients / 2", "(1 - alpha) * (bound - 1) * clients / 2"),
    sizes("the answer's range", "max(1, min(size, bound - 1))", "min(size, bound)"),
    ldp("the last estimate", "self.fraction * state.total / state.rounds", "self.fraction * estimate"),
    fedsampling("answers are kept", "state if self.reuse else None", "state"),
    ldp("pooled estimates with the minimum", "        if not pooled:\n", "        if True:\n"),
    ldp("a share that the sites do not check", "        return self.share\n", "        return None\n"),
    ldp("sizes that a share discloses", "is not None or self.share is not None", "is not None"),
    ldp("answers are asked again", "state.answered if self.reuse else None", "None"),
    fedsampling("never more than one", "min(1.0, self.samples / estimate)", "min(1.0, self.samples / (2 * estimate))"),
    choice("the best, not the worst", "len(asked)), -losses))[:m]", "len(asked)), losses))[:m]"),
    choice("candidates without sizes", "replace=False, p=sizes / sizes.sum())", "replace=False)"),
    uniform(
        "the same every round",
        (
            "federation.config.training.invited(federation.config.clients), "
            'federation.rng("client-sampling")\n'
            "        if self.replacement"
        ),
        (
            "federation.config.training.invited(federation.config.clients), np.random.default_rng(0)\n"
            "        if self.replacement"
        ),
    ),
    batch("the batch in hand is given away again", "self.batch_of[theirs] > batch]", "self.batch_of[theirs] >= batch]"),
    batch("one more batch is lost", "self.batch_of[theirs] > batch]", "self.batch_of[theirs] > batch + 1]"),
    batch("who left keeps its positions", "self.owner[theirs] = -1", "self.owner[theirs[:0]] = -1"),
    batch(
        "a sum, no mean, before the clip",
        "list(reply.gradient.values()), float(reply.size))",
        "list(reply.gradient.values()), 1.0)",
    ),
    batch("a batch of one goes on", "if pairs and len(wanted) > 1 and", "if False and"),
    batch("a refilled pool that serves nothing", "roster.present[rows[useless]] = self._refilled", "self._refilled"),
    enrolled("a label twice", "if len(torch.unique(reply.labels)) != len(reply.labels):", "if False:"),
    enrolled("counts of any size", "(reply.counts < 1) | (reply.counts > MOST_SAMPLES)", "reply.counts < 1"),
    enrolled("counts of any type", "(len(reply.labels),), torch.int64", "(len(reply.labels),), reply.counts.dtype"),
    client_batch("the mean's gradient", "_foreach_mul_(gradients, size)", "_foreach_mul_(gradients, 1.0)"),
    client_batch(
        "samples are taken twice",
        "Pool(pool.order, pool.used + len(positions), pool.refills)",
        "Pool(pool.order, pool.used, pool.refills)",
    ),
    client_batch("pools that look alike", 'f"pool/{label}/{refills}"', 'f"pool/{label}"'),
    label_schedule("not normalised", "totals * (frequency.sum() / max(totals.sum(), 1))", "totals * 1.0"),
    label_client(
        "weights in the order of labels", "by_label[label] = request.factors", "by_label[placeholder] = request.factors"
    ),
    label_client("weights that have no effect", "(losses * factors.to(losses)).sum()", "losses.sum()"),
    label_batch("weights of another schedule", "np.bincount(wanted, minlength", "np.bincount(wanted[::2], minlength"),
    schedule("the cap is the mean", "int(np.median(totals))", "int(np.mean(totals))"),
    schedule(
        "not shuffled",
        "generator.permutation(np.repeat(np.arange(len(frequency)), frequency))",
        "np.repeat(np.arange(len(frequency)), frequency)",
    ),
    single(
        "what was missed is not trained",
        "        self._put_back(task.places[missing])",
        "        self._put_back(trained[:0])",
    ),
    single("failed positions go", "self._put_back(self._trained.get(position, task.places))", "pass"),
    selection("pools of everybody", "np.ceil(retain * able.sum", "np.ceil(able.sum"),
    selection("the shortest run", "longest = lengths.max(axis=1)", "longest = lengths.min(axis=1)"),
    hybrid("the stream's part comes too early", "part * (round - before - 1)", "part * (round - before)"),
    norm("the centre", "if centre is not mean:", "if False:", "models/test_batchnorm.py", "clients/test_fedtan.py"),
    norm(
        "the share", "local * scale * ctx.share", "local * scale", "models/test_batchnorm.py", "clients/test_fedtan.py"
    ),
    norm("a biased variance is remembered", "var * (count / (count - 1))", "var * 1.0"),
    norm("squares about zero", "squares.double() + count * mean.square()", "squares.double()"),
    norm("the batch is its own", "group.all_reduce_sum(part.double()) / ctx.count", "part.double() / ctx.count"),
    fedtan("every step in tandem", "if first and group is not None", "if group is not None"),
    fedtan("statistics go on moving", "            _freeze(model.module)\n", ""),
    fit(
        "the statistics are told",
        "buffers = buffers | {name: b for name, b in request.weights.buffers.items() if name in names}",
        "pass",
        "clients/test_local.py",
        "models/test_batchnorm.py",
        "clients/test_fit.py",
    ),
    fit(
        "counters are told",
        "buffers = buffers | {n: b for n, b in request.weights.buffers.items() if not b.is_floating_point()}",
        "pass",
    ),
    fit("samples are told", "if request.counts else (0, 0, 0)", "if True else (0, 0, 0)"),
    fit(
        "all samples",
        "len(chosen)) < request.keep]",
        "len(chosen)) < 2]",
        "methods/test_fedstas.py",
        "methods/test_fedsampling.py",
    ),
    federation("refused replies are kept", "self.engine.commit(answers)\n", "self.engine.commit(reached)\n"),
    exchanges("one bad part does not void a group", "if together and len(replies) < len(outcomes):", "if False:"),
    federation("a quorum of one less", "if len(answers) < quorum:", "if len(answers) < quorum - 1:"),
    federation(
        "the sum is not checked",
        "total is None or defect_of(total, first.check_reply, check) is not None",
        "total is None",
    ),
    federation("bytes of one client", "size * len(reached)", "size"),
    relay(
        "a refused part goes on",
        "            self._weights = moved\n            self._replies.append(reply)",
        "            self._replies.append(reply)\n        self._weights = moved",
    ),
    relay(
        "a refused part's state is kept",
        "self._engine.commit([client] if accepted else [])",
        "self._engine.commit([client])",
    ),
    relay("another shape goes on", "if defect := defect_of(moved,", "if False and defect_of(moved,"),
    checks(
        "infinity passes",
        "math.isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())",
        "not bool(torch.isnan(leaf).any())",
    ),
    messages(
        "another dtype passes",
        "if other.shape != tensor.shape or other.dtype != tensor.dtype:",
        "if other.shape != tensor.shape:",
    ),
    messages(
        "negative counts",
        "if reply.samples < 0 or reply.steps < 0 or reply.seen < 0:",
        "if reply.samples < 0:",
    ),
    there("periods begin a round late", "(round - 1) // self.period", "round // self.period"),
    there("groups overlap", 'side="right")]', 'side="left")]'),
    engine(
        "an accepted client's state goes",
        "if number in self._pending and self._pending[number].changed():",
        "if number in self._pending and not self._pending[number].changed():",
    ),
    engine(
        "everybody's state is kept",
        "        for number in accepted:\n            if number in self._pending",
        "        for number in list(self._pending):\n            if number in self._pending",
    ),
    store(
        "what was spilled is forgotten",
        "        if client not in self.clients:\n            return {}",
        "        if client not in self._held:\n            return {}",
    ),
    checkpoint("a damaged state passes", 'if _digest(data) != manifest["state"]:', "if False:"),
    checkpoint("a damaged client passes", "if _digest(files[int(client)].read_bytes()) != digest:", "if False:"),
    checkpoint(
        "only what changed is listed",
        'previous["clients"].items() if client in held}',
        'previous["clients"].items() if client in ()}',
    ),
    checkpoint("files of the last but one go", "for kept in complete[:KEEP]:", "for kept in complete[:1]:"),
    identity("any change is allowed", "if allowed is None or (", "if allowed is not None and ("),
    identity("fewer rounds go on", "isinstance(will, int) and will > was", "isinstance(will, int)"),
    identity(
        "the model is not compared",
        '("data", "data"), ("model", "model"), ("partition", "partition")',
        '("data", "data"), ("partition", "partition")',
    ),
    identity(
        "the data are not compared",
        '("data", "data"), ("model", "model"), ("partition", "partition")',
        '("model", "model"), ("partition", "partition")',
    ),
    identity("code is not compared", 'if before["code"].get(name) != now["code"].get(name):', "if False:"),
    logs("the chain is none", "if checksum_of(line, last) != checksum:", "if False:"),
    logs("each line for itself", "            last = checksum\n        elif", '            last = ""\n        elif'),
    logs("a checksum is of its line alone", "sha256(before.encode() + text)", "sha256(text)", "sites/test_ledger.py"),
    logs("zeros are a torn line", 'if number == len(lines) and b"\\0" not in line:', "if number == len(lines):"),
    folder(
        "later records stay",
        "truncate_after(done if done else -1)",
        "truncate_after(10**9)",
        "runs/test_run_folder.py",
        "runs/test_checkpoint.py",
    ),
    folder(
        "lost events are not missed",
        "if last and not self._logs[name].holds(last):",
        "if False:",
        "runs/test_identity.py",
    ),
    folder(
        "other records go on",
        "if name == METRICS:\n                    raise",
        "if False:\n                    raise",
        "runs/test_identity.py",
    ),
    folder("long lists stay", "> LONG:", "> 10**9:", "runs/test_identity.py"),
    checkpoint("it knows no logs", '"logs": dict(logs or {})', '"logs": {}', "runs/test_run_folder.py"),
    division("offsets that fall", "(np.diff(ends) >= 0).all()", "True"),
    recipe(
        "frozen parameters move",
        "return Weights(after.params | frozen, after.buffers) if frozen else after",
        "return after",
        "methods/test_fedbabu.py",
        "methods/test_recipe.py",
        "objectives/test_untrained.py",
    ),
    recipe(
        "losses of all alike",
        "weights = [reply.seen if seen else int(reply.trained) for reply in answers]",
        "weights = [1 for reply in answers]",
        "methods/test_recipe.py",
        "methods/test_fedavg.py",
    ),
    recipe("Λ of sums", "total / len(models)", "total"),
    sfl("the same journey", "permutation(selection.clients)", "permutation(selection.clients) * 0 + selection.clients"),
    sfl("it learns from a relay", "if sampler.learns(config):", "if False:"),
    head("the whole model is tuned", "for name in config.model.head_names}", "for name in config.model.params()}"),
    head("another sample each round", 'rng(config.seed, "server-samples")', 'rng(config.seed + 1, "server-samples")'),
    predictions("the mean of batches", "data.task.total_loss(output, y)", "float(data.task.mean_loss(output, y))"),
    fitting("means apart are forgotten", "other.squares + distance * distance * share * self.count", "other.squares"),
    fitting("the mean of means", "share, distance = other.count / count.clamp(min=1),", "share, distance = 0.5,"),
    fitting("imputed values are not counted", "share = value - mean, n_missing /", "share = value, n_missing /"),
    fitting("the upper median", "counts.sum() / 2)", "counts.sum() / 2, side='right')"),
    fitting("no step", "np.round(values / column.step) * column.step", "values"),
    sites_data("a site's test rows are another client's", "first=client, task", "first=0, task"),
    targets("features are told with the targets", "rows if self._fits_features else rows[:0]", "rows"),
    targets("fewer targets than samples", "(targets.count != targets.samples).any() or any(", "any("),
    rounded_targets("targets are rounded up", "/ self.step).floor()", "/ self.step).ceil()"),
    told_targets("labels are told in spite of masking", 'frozenset({"labels"} if', 'frozenset({"labels"} if False and'),
    sites_data(
        "held-out rows are counted", "trained_on(data_set, whole, held)", "trained_on(data_set, whole, type(held)())"
    ),
    sites_data("a single sample will do", "FEWEST = 2", "FEWEST = 1"),
    sites_data("an error that leaves tells a cell", 'getattr(error, "public", "") or', "str(error) or"),
    scaled_inputs("normalised by the training set and not", "varies = deviation > 1e-7", "varies = deviation > 1e7"),
    loop(
        "the last round is not counted",
        "or self.round >= self.spec.training.rounds",
        "or self.round > self.spec.training.rounds",
    ),
    logs(
        "a checksum of a run's line is of its line alone",
        "sha256(before.encode() + text)",
        "sha256(text)",
        "base/test_jsonl.py",
    ),
    ledger("the line before does not count", "checksum_of(line, digests[-1])", "checksum_of(line)"),
    ledger("answers leave before they are on the disk", "        self._log.sync()\n", ""),
    ledger("the most samples", "else min(fewest, samples)", "else max(fewest, samples)"),
    encoded("two exchanges of a round draw alike", 'client.rng(f"codec/{request.exchange}"', 'client.rng("codec"'),
    encoded(
        "all exchanges draw alike",
        'client.rng(f"codec/{request.exchange}", request.round)',
        'client.rng("codec", 0)',
    ),
    encoded("the model of a first sum is forgotten", "        before[MODEL] = client.state[MODEL]\n", ""),
    encoded("who did not train forgets", "bool(change) and whole.has_update()", "bool(change)"),
    encoded("who did not train forgets after a second sum", "if pending.reply.has_update():", "if True:"),
    encoded("a second sum of any size leaves", "    client.authorize_release(pending.behind)\n", ""),
    compression(
        "all renewals draw alike", 'rng(self.seed, f"codec/down/{version}", round)', 'rng(self.seed, "codec/down")'
    ),
    compression("two renewals of a round draw alike", 'f"codec/down/{version}"', '"codec/down"'),
    compression(
        "going down, the uncompressed beginning",
        "isinstance(self.down, WithMemory) and round < self.down.start",
        "False",
    ),
    compression("one model in a round", "== round and self._renewed_from is params:", "== round:"),
    compression("each exchange starts from the first basis", "return before if alike else fresh", "return fresh"),
    compression(
        "changes longer than the model",
        "while sum(map(records.size, changes)) >= records.size(params):",
        "while False:",
    ),
    compression(
        "sums in single precision",
        "[_double(unpack(answer.payload, self.forms)) for",
        "[unpack(answer.payload, self.forms) for",
    ),
    codecs("the next basis is of any length", "(new / norm).float()", "new.float()"),
    codecs("of equal values the last", "equal[: k - len(above)]", "equal[len(equal) - k + len(above) :]"),
    codecs("one iteration", "for _ in range(2):", "for _ in range(1):"),
    clock("nobody waits for a deadline", "last if deadline is None else min(last, deadline)", "last"),
    clock("time passes twice", "            self._seconds = {}\n", ""),
    exchanges(
        "a hop's way takes no time",
        "self.clock.pass_time(log)",
        "pass",
        "federation/test_network.py",
    ),
    exchanges("nobody is at fault in a broken group", "broken = not refused and all(", "broken = False and all("),
    exchanges(
        "one client alone shows a fault of the program",
        "several = len(asked) >= min(2, self._config.clients)",
        "several = True",
    ),
    exchanges("a resumed run ends at the first fault", "if self.resumed or not several", "if not several"),
    federation(
        "an evaluation changes states",
        "self.engine.commit([])\n        replies: dict",
        "self.engine.commit(outcomes)\n        replies: dict",
    ),
    federation(
        "a sum is never late",
        'execution != "fused" or alone:',
        'execution != "fused":',
        "federation/test_network.py",
    ),
    federation(
        "a client that is away at enrolment is not a candidate",
        "if not self.availability.announced or self.round == 0:",
        "if not self.availability.announced:",
        "federation/test_availability.py",
    ),
    there("models of a list draw together", "if place else seed", "if False else seed"),
    there("a client is online in any of the models", "online &= model", "online |= model"),
    patterns(
        "the first round is not stationary", "if t > 1 else (p[rest], p[rest])", "if t > 0 else (p[rest], p[rest])"
    ),
    patterns("short spells do not alternate", "flips = goes_online > stays_online", "flips = goes_online > 1"),
    patterns("periods begin together", "return (round - 1 + start) % period", "return (round - 1) % period"),
    patterns("one time zone", '+ self.spread * uniforms(seed, "zone", 0, clients)', ""),
    correlated("labels by number of samples", "np.maximum(counts.sum(axis=1, keepdims=True), 1)", "counts.max()"),
    correlated("weights of one seed", 'rng(population.seed, "label weights")', 'rng(0, "label weights")'),
    there("speeds of one seed", 'uniforms(seed, "speed", 0, clients)', 'uniforms(0, "speed", 0, clients)'),
    there("periods of one seed", 'uniforms(seed, "online", (round - 1)', 'uniforms(0, "online", (round - 1)'),
    there(
        "groups of one seed",
        'uniforms(seed, "online", round, clients) < p\n',
        'uniforms(0, "online", round, clients) < p\n',
    ),
    holdouts("all of a client's samples", "np.maximum(sizes - 1, 0))", "sizes)"),
    holdouts("parts of one seed", '(uniforms(seed, f"{purpose}-start"', '(uniforms(0, f"{purpose}-start"'),
    evaluator("the worst tenth, rounded down", "tenth = -(-count // 10)", "tenth = np.maximum(count // 10, 1)"),
    evaluator("values of some clients only", "and all(reply.values is not None", "and any(reply.values is not None"),
    metrics(
        "twice the error",
        "_mean_of_known(_ratio(tied / 2, pairs)[None])[0])\n\n    def _pairs",
        "_mean_of_known(_ratio(tied, pairs)[None])[0])\n\n    def _pairs",
    ),
    sums("who is certain is in the other bin", "posinf=EXTREME, neginf=-EXTREME", "posinf=-EXTREME, neginf=EXTREME"),
    sums(
        "a bin's lower edge",
        "np.ceil(np.nan_to_num(confidence) * bins).astype(np.int64) - 1",
        "np.floor(np.nan_to_num(confidence) * bins).astype(np.int64)",
    ),
    history(
        "a target is passed, not reached",
        "value <= target if lower else value >= target",
        "value <= target if lower else value > target",
    ),
    history("the spread of ten rounds", '"accuracy")[1][-20:]', '"accuracy")[1][-10:]'),
    history(
        "another model is read",
        "if checksum not in (None, hashlib",
        "if False and checksum not in (None, hashlib",
        "runs/test_predictor.py",
    ),
    loop_state("the last of the best", "sign * value > sign * best.value", "sign * value >= sign * best.value"),
    loop_state("heard in the first of them", "self.last_reply <= first", "self.last_reply < first"),
    loop_state("replies are forgotten", "self.last_reply = saved.heard.copy()", "pass"),
    loop_state(
        "evaluations are forgotten",
        "self.evaluated, self.last, self.best = list(saved.evaluated), saved.last",
        "self.evaluated, self.last, self.best = [], saved.last",
    ),
    callbacks("no value is the best", "return value is not None\n", "return best is None\n"),
    callbacks(
        "the metric's own direction", 'if self.mode is None else self.mode == "min"', 'if True else self.mode == "min"'
    ),
    checkpoint("the last one that is allowed", "path.name > _name(last)", "path.name >= _name(last)"),
    checkpoint("a damaged one of this round stays", "stale.name >= _name(round)", "stale.name > _name(round)"),
    checkpoint("what was read is written again", "limit=None))\n        store.changed.clear()\n", "limit=None))\n"),
    checkpoint(
        "what was written is written again", "    _sync(folder)\n    store.changed.clear()\n", "    _sync(folder)\n"
    ),
    checkpoint("one of another round", 'if _name(manifest["round"]) != path.name:', "if False:"),
    weighted("more draws than clients", "    m = min(m, len(clients))\n", ""),
    allocation("more than one draw for sure", "floor = min(1.0, FLOOR * budget", "floor = (FLOOR * budget"),
    allocation("every stratum is drawn", "np.minimum(exact, 1.0)", "np.ones_like(exact)"),
    allocation("strata without a spread", " + 1e-12 * sizes / sizes.sum()", "", "sampling/test_allocation.py"),
    sizes(
        "a client without samples is drawn",
        "in replies.items() if reply.samples}",
        "in replies.items()}",
        "sampling/test_weighted.py",
        "sampling/test_clustered.py",
    ),
    sizes("a lie may be none", "generator.integers(1, bound)", "generator.integers(0, bound)"),
    ldp("a bound that clips is not told", "(config.sizes >= self.bound).any()", "(config.sizes > self.bound).any()"),
    ldp("more than all samples", "else min(1.0, wanted / used)", "else wanted / used"),
    clustered("groups that fill a distribution", "weight[node] <= total:", "weight[node] < total:"),
    clustered("the whole mass", "masses = (sizes * m) % total", "masses = sizes * m"),
    kmeans("only the own centre moves", "lower -= shift.max()", "lower -= shift[labels]"),
    quantization("a code too many", "codes.max() >= len(centres)", "codes.max() > len(centres)"),
    aggregation("who is drawn twice counts once", "share * selection.draws[returned]", "share"),
    roster(
        "who left is refilled",
        "self.available[rows] = self.present[rows]\n        for client in clients:",
        "self.available[rows] = True\n        for client in clients:",
    ),
    roster(
        "what is exhausted is asked again",
        "rows[np.isin(places, missing) | np.isin(numbers, exhausted.numpy())]",
        "rows[np.isin(places, missing)]",
    ),
    roster("who left comes back", "self.available[rows] = self.present[rows] = False", "self.available[rows] = False"),
    schedule("the mean is rounded down", "round(float(totals.mean()))", "int(totals.mean())"),
    batch(
        "all that is held back is given up",
        "given_up: Bools = held & self._last[wanted]",
        "given_up: Bools = held",
        "stratify/test_gathering.py",
        "stratify/test_batch.py",
    ),
    batch(
        "a batch too many",
        "reply.batches[~reply.missing] >= self.batches",
        "reply.batches[~reply.missing] > self.batches",
        "stratify/test_gathering.py",
        "stratify/test_batch.py",
    ),
    batch("the root is the ratio", '"sqrt": 0.5,', '"sqrt": 1.0,'),
    client_batch(
        "a label of few samples is drawn from",
        "if len(order) < client.context.privacy.min_samples:",
        "if False:",
        "stratify/test_gathering.py",
        "stratify/test_batch.py",
        "sites/test_privacy_page.py",
    ),
    client_batch(
        "samples arrive in another order each round",
        'client.rng(f"arrival/{label}", 0)',
        'client.rng(f"arrival/{label}", request.round)',
    ),
    tags("one key for all", 'hmac.digest(key, b"fedstrata/label/"', 'hmac.digest(bytes(32), b"fedstrata/label/"'),
    tags("one order for all seeds", 'b"fedstrata/order/" + str(seed).encode()', 'b"fedstrata/order/"'),
    counting(
        "shares above the total",
        "wrong = (rest < unknown) | ((unknown == 0) & (rest != 0))",
        "wrong = (unknown == 0) & (rest != 0)",
    ),
    counting(
        "shares are rounded down",
        "np.rint(reply.shares.numpy() * totals[held[client]])",
        "np.floor(reply.shares.numpy() * totals[held[client]])",
    ),
    slots("an unused row is found", "(rows >= min(labels, last)).any()", "(rows >= last).any()"),
    slots("a difference may be the prime", "candidate = self.classes + 2", "candidate = self.classes + 1"),
    slots("a factor of zero", "factors = 1 + below(p - 1, self.slots)", "factors = below(p, self.slots)"),
    noise(
        "too little noise at real sites", "torch.from_numpy(ndtri(uniform))", "torch.from_numpy(0.9 * ndtri(uniform))"
    ),
    draws("the draws of real sites from the seed", "secrets.randbits(256) if context.secret", "0 if context.secret"),
    budget("one step too many", "self._epsilon(spending) > self._most", "self._epsilon(spending) > 1.01 * self._most"),
    budget("only the last job counts", "sum(self.by_job().values(),", "next(reversed(self.by_job().values()),"),
    budget("the first order", "np.argmax((most - added", "0 * np.argmax((most - added"),
    spending("no step is counted", "if steps:\n", "if not steps:\n"),
    policy("too little noise", "dp.noise < self.dp", "dp.noise < 0"),
    policy("anything without noise", "name not in self.outside_dp]", "not name]"),
    policy("plain sums", 'if self.sums == "secure":', "if False:"),
    policy("sums of fewer sites", "elif privacy.parties < self.parties:", "elif False:"),
    policy(
        "one description more",
        "len(before) >= self.surveys and",
        "len(before) > self.surveys and",
        "hostile/test_errors.py",
    ),
    guard(
        "what was mended still counts",
        '            trials["failed"].remove(key)\n',
        "",
        "hostile/test_errors.py",
    ),
    guard("a group once more", ">= REPEATS:", "> REPEATS:"),
    guard(
        "a round too many is stored",
        "if not 0 <= round <= self.declaration.rounds:",
        "if not 0 <= round <= self.declaration.rounds + 1:",
    ),
    guard("the counts of another process", "count + getattr(self, key) - self._in_file[key]", "count"),
    guard(
        "labels before they have a meaning", "if first is not None and numbers and not any(", "if False and not any("
    ),
    guard("another round inside", "if allowed.inside is not None and _round_of", "if False and _round_of"),
    guard(
        "an enrolment again and again",
        'if match.allowed.per == "run" or rule.phase == "enrolment":',
        'if match.allowed.per == "run":',
    ),
    members(
        "no list that can be read, nobody is struck off", "self._last = self._last or []", "self._last = self._last"
    ),
    certificates("before its time", "if now < begin:", "if False:"),
    certificates(
        "it outlives its root",
        "end = min(now + timedelta(days=days), root.not_valid_after_utc)",
        "end = now + timedelta(days=days)",
    ),
    certificates("any key", "if not _fits(certificate, key):", "if False:"),
    certificates("a request of another site", "if other != name or", "if", REQUESTS),
    certificates("a request that is not signed", "or not valid or", "or", REQUESTS),
    certificates("a short key", " or key.key_size < KEY_BITS", "", REQUESTS),
    certificates("a key is overwritten", "if (folder / KEY).exists():", "if False:", REQUESTS),
    provision("the kit keeps a key", "private_key.unlink()", "pass", REQUESTS),
    predictor("BatchNorm goes on with the batch", "            layer.eval()\n", ""),
    predictor(
        "a changed description",
        'if about.pop("checksum", None) not in (None, _checksum(about)):',
        'if about.pop("checksum", None) and False:',
    ),
    predictor(
        "labels that look like numbers",
        "tuple(whole) if [str(label) for label in whole] == names else tuple(names)",
        "tuple(whole)",
    ),
    statistics("one interval at a time", "/ 2 / together, n - 1)", "/ 2, n - 1)"),
    statistics("the rounding of one number", "resolution / 6**0.5)", "resolution / 12**0.5)"),
    statistics("two seeds are enough", "if self.n < MIN_SEEDS or", "if self.n < 2 or"),
    judging(
        "a claim is corrected to be confirmed", "if right == len(alone)", "if together.count(wanted) == len(alone)"
    ),
    judging("a part of a claim is not corrected", "for count in (1, len(places))", "for count in (1, 1)"),
    judging(
        "a part is supported without correction", "if wanted in together and right", "if wanted in alone and right"
    ),
    statistics("Holm without steps", "value * (len(p) - place)", "value * len(p)"),
    statistics("Holm's order", "largest = max(largest, min(", "largest = max(0.0, min("),
    board_ranks("the worst method comes first", "rankdata(-table, axis=0)", "rankdata(table, axis=0)"),
    board_ranks("Nemenyi with twice the blocks", "/ (6 * blocks))", "/ (12 * blocks))"),
    board_judging("a budget without limit", "if point[place] <= budget * FEW_MORE]", "]"),
    board_judging("personal models on other samples", "if not each.entry.is_personal", "if True"),
    board_running("the worst trial is chosen", "return max(finished, key=", "return min(finished, key="),
    board_running("the last evaluation alone", "(1 - LATE) * len(history)", "len(history)"),
    tables("clients that were not heard of", ' and not name.startswith(f"{_CLIENTS}unheard.")', ""),
    fedssar("clients away count", " * (available_sizes / sizes)[selection.stratum]", ""),
    fedssar(
        "the model's sketch is an update's",
        "points = points - sent if self.features",
        "points = points if self.features",
    ),
    fedssar(
        "places by the size of all",
        "np.arange(len(sizes)), available, budget, generator)",
        "np.arange(len(sizes)), sizes, budget, generator)",
    ),
    sketches("who took no step has an update", "in replies.items() if reply.trained}", "in replies.items()}"),
    choice("as many candidates as clients", "self.candidates or 2 * m", "self.candidates or m"),
    choice(
        "of equal losses the first",
        'federation.rng("client-sampling").permutation(len(asked))',
        "np.arange(len(asked))",
    ),
    sampled(
        "the mean of the batches' means",
        "task.total_loss(client.model(params, batch.x), batch.y)",
        "float(task.mean_loss(client.model(params, batch.x), batch.y))",
    ),
    sampled("a last batch counts as the others", " * (float(task.weights(batch.y).sum()) / whole)", ""),
    fit(
        "the same samples in every round",
        'client.rng("keep", request.round)',
        'client.rng("keep", 0)',
        "clients/test_fit.py",
        "clients/test_local.py",
        "methods/test_fedstas.py",
    ),
    fit(
        "samples that do not train are behind an update",
        "client.authorize_update(len(chosen))",
        "client.authorize_update(len(client))",
        "clients/test_minimum.py",
        "clients/test_fit.py",
    ),
    dealing("pieces are rounded, not drawn", "len(members) + rng.random())", "len(members) + 0.5)"),
    dealing("who draws first is served first", "pending = rng.permutation(pending)", "pending = pending"),
    dealing(
        "what is left goes to the first holders",
        "np.lexsort((rng.random(len(held)), held))",
        "np.lexsort((np.arange(len(held)), held))",
    ),
    dealing("no classes are swapped", "range(10 + 5 * int(each.max()))", "range(0)"),
    dealing("a gift of neighbours", "result[rng.permutation(selected)]", "result[selected]"),
    division("shards of neighbours", "shuffled = rng.permutation(len(labels))", "shuffled = np.arange(len(labels))"),
    division("shards are dealt in order", "holder = rng.permutation(shards) //", "holder = np.arange(shards) //"),
    single(
        "what was missed comes first",
        "self.roster.generator.integers(0, len(self._left) + 1, size=len(places))",
        "np.zeros(len(places), dtype=np.int64)",
    ),
    single(
        "a pool that is empty after a refill is refilled",
        "roster.present[rows[np.isin(places, list(task.refill)) & ~np.isin(places, trained)]] = False",
        "pass",
    ),
    single("a refill for each task", "                    due -= refill\n", "                    pass\n"),
    recipe(
        "epochs and weight decay under privacy",
        "if config.training.local_steps is None and (decays",
        "if False and (decays",
        "integration/test_private_sizes.py",
    ),
    policy("rounds without a limit", "if asked.rounds > self.rounds:", "if False:"),
    policy(
        "the smaller minimum",
        "if self.min_samples <= privacy.min_samples:",
        "if self.min_samples >= privacy.min_samples:",
    ),
    policy(
        "the spec's way with small parts",
        'update={"min_samples": self.min_samples, "below": self.below}',
        'update={"min_samples": self.min_samples}',
    ),
    policy("extremes are single samples'", "if asked.extremes and self.min_samples > 1:", "if False:"),
    once("an answer that nobody waits for", "if not first and number < self._newest:", "if False:"),
    once(
        "an error is asked for again",
        "                    answer.set_exception(error)\n",
        "                    answer.set_exception(error)\n                    self._newest -= 1\n",
    ),
    site_sums("a site brings another's part", "if set(part.places) != places.get(site) or", "if"),
    rebafl(
        "prototypes of few samples leave",
        "len(context.counts), trained.least)",
        "len(context.counts))",
        "objectives/test_rebafl.py",
        "objectives/test_prototypes.py",
        "clients/test_minimum.py",
    ),
    rebafl("classes nobody knows are in the cycle", 'positions % context.derived["known"]', "positions % len(P)"),
    sharpness(
        "the length of each tensor alone",
        "torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))",
        "torch._foreach_norm(parts)[0]",
    ),
    sharpness("downhill", "scaled(gradient(), self.rho)", "scaled(gradient(), -self.rho)"),
    sharpness("the way of the global model", "old[name] - w for", "w - old[name] for"),
    sharpness("the last model is the client's own", '{"start": context.start,', '{"start": trained.params,'),
    sharpness("the other objective forgets", 'kept=kept.get("other")', "kept=None"),
    displaced("the next step begins at the displaced point", "torch._foreach_copy_(leaves, kept)", "pass"),
    displaced("both passes count for running statistics", "self.model.untrained.restore(buffers)", "pass"),
    displaced("the loss at the other point", "(at_start[0][0] if at_start else loss)", "loss"),
    local(
        "gradients that are not counted",
        "seen += batch.y.shape[0] * objective.gradients_per_step",
        "seen += batch.y.shape[0]",
        "objectives/test_sharpness.py",
    ),
    local("a last hook in training mode", "            model.module.eval()\n", ""),
    local("the quick way without the displacement", " or setup.displaces):", "):", "objectives/test_sharpness.py"),
    entropy("the labels of those before do not count", "entropies(total + counts)", "entropies(counts)"),
    entropy(
        "the least even client is added", "gains >= gains.max() - 1e-12", "gains <= gains[gains >= 0].min() + 1e-12"
    ),
    entropy("a client is added twice", "gains[chosen] = -1", "gains[:0] = -1"),
    entropy("the first client is always the same", 'federation.rng("client-sampling").permutation(free)', "free"),
    entropy("nobody waits", "~np.isin(clients, waiting)", "np.isin(clients, clients)"),
    entropy(
        "those that waited least return first",
        "waiting[max(0, m - (len(clients) - len(waiting))) :]",
        "waiting[: min(len(waiting), len(clients) - m)]",
    ),
    entropy("the buffer keeps the first clients", "recent[len(recent) - size :]", "recent[:size]"),
    graph("the others' distance does not count", "links += pair[best]", "pass"),
    graph("one client less is chosen", "for _ in range(m):", "for _ in range(m - 1):"),
    graph("nobody is exchanged", "if gains.max() < 1e-9:", "if True:"),
    graph(
        "similar clients are far apart",
        "np.exp(-(similarity[ends] ** 2) / sigma)",
        "np.exp(similarity[ends] ** 2 / sigma)",
    ),
    graph(
        "edges instead of paths",
        "floyd_warshall(edges, directed=False)",
        "np.where((similarity > epsilon) | ~pairs, edges.toarray(), np.inf)",
    ),
    graph("clients without a path are near", "np.where(reached, paths, limit)", "np.where(reached, paths, 0.0)"),
    graph(
        "the mean counts neither way",
        "(2 * (times[order] - times.mean()) + 1)",
        "(2 * (times.mean() - times[order]) + 1)",
    ),
    graph("nobody is counted", "result[places] += 1", "pass"),
    graph(
        "invited clients are counted again",
        'if self.counted == "invited":\n            return state',
        "if False:\n            return state",
    ),
    stratified(
        "an inclusion probability is that of one draw",
        "probability[members] = inclusion / allocation[h]",
        "probability[members] = inclusion",
    ),
    stratified(
        "systematic draws ignore the norms", "dtype=np.int64), p, np.zeros(", "dtype=np.int64), 0 * p + 1, np.zeros("
    ),
    stratified(
        "systematic draws in a fixed order of two",
        "systematic(inclusion[order], generator)",
        "np.round(inclusion[order]).astype(int)",
    ),
    fedssar("clusters are certain to be drawn", "np.minimum(m * available_sizes / total, 1.0) if few", "None if few"),
    fedssar(
        "clusters are drawn equally often",
        "m * available_sizes / total, 1.0)",
        "0 * available_sizes + m / len(sizes), 1.0)",
    ),
    fedssar(
        "the chance of a cluster that is certain", "available_sizes > 0).sum() > m", "available_sizes > 0).sum() > 0"
    ),
    client_sum("updates are not clipped", "min(1.0, clip / norm) if norm", "1.0 if norm"),
    client_sum("every update gets the largest norm", "min(1.0, clip / norm)", "clip / norm"),
    client_sum("the noise is divided twice", "total + deviation *", "total + deviation / cohort *"),
    client_round(
        "the noise of the first round in every round",
        'federation.rng("client-noise")',
        '__import__("numpy").random.default_rng(0)',
    ),
    client_round(
        "the number of answers as divisor", "_cohort(recipe, federation), normal", "max(len(answers), 1), normal"
    ),
    client_round(
        "the number of noisy answers as divisor",
        "total / _cohort(recipe, federation)",
        "total / len(summed.clients)",
        SHARES_ROUND,
    ),
    client_round(
        "personal and frozen parameters are in the sum",
        "recipe.frozen(config)",
        "frozenset()",
    ),
    client_accountant(
        "a limit with amplification", "if dp is None or dp.participations is not None or", "if dp is None or"
    ),
    client_accountant("availability with amplification", " or not spec.availability.always_online", ""),
    client_accountant("only drawn clients count for sampling", "slice(None) if self.rate is not None else ", ""),
    client_accountant("a round more than the budget", "remaining.max() + 1", "remaining.max()"),
    client_accountant(
        "one invitation more than the limit", "self._rounds(memory) >= most", "self._rounds(memory) > most"
    ),
    client_accountant("rounds add up linearly", "noise / math.sqrt(rounds)", "noise / rounds"),
    client_accountant("one round of noise shares", "rounds * skellam_divergence", "skellam_divergence", SKELLAM),
    client_accountant("the larger branch of the bound", "gaussian + min(", "gaussian + max(", SKELLAM),
    client_accountant("rounds with too few clients below the limit", "0 < left < least", "False", SKELLAM),
    shares("colluding clients keep the noise", "math.sqrt(least - dp.colluding)", "math.sqrt(least)"),
    shares("long noisy updates are not scaled", "update * min(1.0, clip / norm)", "update"),
    shares(
        "the last bit counts as scaled",
        "np.clip(update * min(1.0, clip / norm), -clip, clip)",
        "update * (clip / norm)",
    ),
    shares("a client with NaN does not answer", "if not math.isfinite(norm):", "if False:"),
    masked("the same share in every round", '"noise share", request.round', '"noise share", 0', SHARES_ROUND),
    masked("no share", "if form.ring.noise:", "if False:", SHARES_ROUND),
    masked(
        "the shares of real sites from the seed",
        'client.rng("noise share", request.round)',
        '__import__("fedstrata").base.rng.rng(5, "noise share", request.round, client.number)',
        SITE_SHARES,
    ),
    shares("too many colluding clients", "2 * least - clients - 1", "least"),
    shares("too many colluding clients with a large threshold", "min(least - 2, ", "min(least, "),
    shares("rounding does not count", "self.ring.scale + size", "self.ring.scale"),
    ring("twice the noise", "generator.poisson(variance / 2", "generator.poisson(variance", *shares.tests),
    ring("no room for noise", "LARGEST / (self.sites + HEADROOM", "LARGEST / (self.sites + 0", *shares.tests),
    secure_checks(
        "a sum of few clients has too little noise",
        "max(privacy.parties, protocol.default_threshold(method.most_summed(config)))",
        "privacy.parties",
        SHARES_ROUND,
    ),
    client_checks(
        "a random number of shares", 'dp.noise_from == "sites" and isinstance', "False and isinstance", SHARES_ROUND
    ),
    client_checks("online clients decide about others", "(spec.availability.announced,", "(False,"),
    client_checks("colluding attackers", "spec.attack is not None and spec.attack.alters_replies", "False"),
    client_checks("PowerSGD mixes updates", "isinstance(spec.communication.up, PowerSGD)", "False"),
    client_checks("single updates at the server", 'if not is_plain(objective, "server_update"):', "if False:"),
    recommended("all invited clients reply", "run.online & run.invited)", "run.invited)"),
    recommended("an absence has no last round", "(current + 1) * row", "current + row"),
    recommended("offline spells are counted by round", "(before & ~online).sum()", "(~online).sum()"),
    rounds(
        "clients are invited by the seed of the partition", "replace(prepared.config, seed=seed)", "prepared.config"
    ),
    rounds("a sampler that needs models is used", "method.client_sampler.learns(config)", "False"),
    advice("results of every column decide", "if columns and columns[0].alike else", "if columns else"),
    advice("methods that are behind are advised", "and name not in behind]", "]"),
    intervals("the slope of δ without the factor 2", "2 * canaries * delta", "canaries * delta"),
    intervals("all of the error for each share", "(1 - confidence) / len(SHARES)", "(1 - confidence)"),
    intervals("both tails on one side", "(1 - confidence) / 2", "(1 - confidence)"),
    membership("members have the smaller cosine", "(inside > outside)", "(inside < outside)"),
    server_view("clients with equal weights", "reply.size / whole", "1 / len(replies)"),
    planting("absent canaries have a gradient", "self.strength * x[:, 0, 0, 2]", "self.strength"),
    planting("the noise of the control is not divided", "dp.noise / divide_noise", "dp.noise"),
    planting("canaries change the sampling rate", "round(rate * whole)", "config.training.batch_size"),
]
