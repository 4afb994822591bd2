"""Audit prototypes: reconstruct clients' images from the prototypes that the clients sent (ReBaFL §5.6).

A prototype is the mean feature vector of a client's images of one class. All attacks have the same targets: the
prototypes that a client sent and, for comparison, controls. A control is the feature vector of one of the client's
images, or the mean over a few of these images. Clients do not send controls. If an attack reconstructs an image from a
control but not from the prototype, averaging hides the image. If the attack reconstructs an image from neither of them,
the attack is too weak for a conclusion.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.audits.attacks import ATTACKS, TUNING, View, features_of
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.replay import Sent, Watch, replay
from fedstrata.audits.similarity import Likeness, likeness, metrics
from fedstrata.base.errors import SpecError
from fedstrata.base.process import training_process
from fedstrata.base.rng import rng
from fedstrata.data.dataset import Split
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again, spec_of

HeldOut = Literal["test", "spare"]
BASELINE = "class mean"
"""The name of the baseline, which ignores the feature: the mean held-out image of the class."""
SIZES = (1, 5, 25)
"""The numbers of images per control."""
DRAWS = 4
"""The number of controls (features that are attacked for comparison) per client, class and number of images."""
CLASSES = 4
"""The maximum number of classes to attack per client."""
COMPARED = 1000
"""The maximum number of images per client and class with which a reconstruction is compared."""
MOST = 10_000
"""The maximum number of the attacker's own images ("held-out images")."""
FEWEST = 4 * TUNING
"""The minimum number of held-out images for an audit."""
DRIFT = 1e-3
"""The audit warns if the relative difference between the prototypes of a run and of its replay exceeds this number."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Target:
    """A feature to attack, and the images from which the feature was computed. The attacker does not have the images.

    Args:
        client: The id of the client.
        label: The class of the images.
        size: The number of images whose feature vectors have the mean ``feature``.
        sent: Whether the feature is a prototype that the client sent. Otherwise, the feature is a control.
        feature: The feature h, shape (d,).
        own: The images from which the feature was computed, with values in [0, 1] and shape (n, C, H, W).
        unseen: Up to n images of the same class that the client does not have ("strangers").
    """

    client: int
    label: int
    size: int
    sent: bool
    feature: Tensor
    own: Tensor
    unseen: Tensor


@dataclass(frozen=True, eq=False)
class Finding:
    """The result of one attack on one target.

    Args:
        attack: The name of the attack, or ``BASELINE``.
        target: The target.
        image: The reconstruction, with values in [0, 1] and shape (C, H, W).
        mean: The mean similarity of the reconstruction to the images from which the feature was computed.
        nearest: The largest similarity of the reconstruction to one of the images from which the feature was computed.
        stranger: The largest similarity of the reconstruction to a stranger (see ``Target``); None if there are no
            strangers. If an attack does not learn anything about the client, ``stranger`` is about as large as
            ``nearest``.
        average: The similarity of the reconstruction to the mean of the images from which the feature was computed.
        feature_error: The relative error ‖f(x) − h‖ / ‖h‖ of the reconstruction's feature f(x); None if h = 0.
    """

    attack: str
    target: Target
    image: Tensor
    mean: Likeness
    nearest: Likeness
    stranger: Likeness | None
    average: Likeness
    feature_error: float | None


@dataclass(frozen=True)
class Audit:
    """The results of an audit of prototypes.

    Args:
        method: The name of the run's method.
        data: The name of the run's data set.
        class_names: The names of the classes.
        sent: The prototypes that the attacked clients sent.
        held_out: The source of the attacker's own images; see ``audit_prototypes``.
        held_out_images: The number of the attacker's own images.
        steps: The number of optimisation steps per attack.
        seed: The seed of all draws.
        findings: The results, one for every pair of a target and an attack.
    """

    method: str
    data: str
    class_names: tuple[str, ...]
    sent: Sequence[Sent]
    held_out: HeldOut
    held_out_images: int
    steps: int
    seed: int
    findings: Sequence[Finding]


def audit_prototypes(
    run: str | Path,
    *,
    clients: int = 3,
    steps: int = 300,
    seed: int = 0,
    held_out: HeldOut = "test",
    prepared: Prepared | None = None,
    watch: Watch | None = None,
) -> Audit:
    """Attack the last prototypes that clients sent in a run.

    Args:
        run: The run folder.
        clients: The maximum number of clients to attack. The clients are drawn from all clients that sent prototypes
            between the run's last two checkpoints.
        steps: The number of optimisation steps per attack.
        seed: The seed of all draws. Two audits with the same seed have the same results.
        held_out: The attacker's own images: the test set (``"test"``), or the training samples that no client has
            (``"spare"``).
        prepared: The run's experiment; needed only if the run used your own data or model.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: ``run`` is not a run folder, the method does not send or keep prototypes, or the samples are not
            images.
        CheckpointError: The run does not have a checkpoint.
        ExtraMissingError: The extra ``audit`` is not installed.
    """
    folder = Path(run)
    spec_of(folder, "audit")
    for name, value in (("clients", clients), ("steps", steps)):
        if value < 1:
            raise SpecError(name, "must be an integer of at least 1.", value)
    metrics()
    prepared = prepared or prepare_again(folder, "audit")
    spec = prepared.spec
    watch = watch or (lambda done, total, text: None)
    pixels = Pixels.of(prepared.data)
    images, labels, theirs = _held_out(prepared, pixels, held_out, seed)
    findings: list[Finding] = []
    # Use the run's number of threads. With another number, a repeated round does not give the same bits.
    with training_process(spec.training.threads):
        sent = replay(prepared, folder, clients, seed, watch)
        if (drift := max(one.difference for one in sent)) > DRIFT:
            warnings.warn(
                f"the prototypes of the replayed rounds differ by {drift:.1%} from the stored prototypes. The original "
                "run used another version of fedstrata or another machine. The audit attacks the replayed prototypes.",
                stacklevel=2,
            )
        for place, one in enumerate(sent):
            model = prepared.config.model
            with model.loaded(one.weights.params, one.weights.buffers) as params:
                view = View.of(model, params, pixels, images, labels)
                targets = _targets(prepared, view, one, theirs, seed)

                def tell(done: int, text: str, place: int = place, client: int = one.client) -> None:
                    parts = len(ATTACKS) + 1
                    watch(place * parts + done, len(sent) * parts, f"client {client}: {text}")

                findings += _attacked(view, targets, steps, seed, one.client, tell)
    data = prepared.data
    return Audit(spec.method.name, data.name, data.class_names, sent, held_out, len(images), steps, seed, findings)


def _held_out(prepared: Prepared, pixels: Pixels, held_out: HeldOut, seed: int) -> tuple[Tensor, Tensor, Ints]:
    """Return the attacker's images in random order, their labels, and their indices in the training set.

    The array of indices is empty if the images are from the test set.
    """
    data = prepared.data
    split: Split = "test" if held_out == "test" else "train"
    spare = prepared.config.server_data or ServerData(data, prepared.assignment)
    indices = np.arange(len(data.y_test)) if held_out == "test" else spare.indices()
    if len(indices) < FEWEST:
        problem = f"the attacker needs at least {FEWEST} images, but there are only {len(indices)}. "
        problem += "Use held_out = 'test'." if held_out == "spare" else "Audit a run with other data."
        raise SpecError("held_out", problem, held_out)
    chosen = rng(seed, "audit-held-out").permutation(indices)[:MOST]
    theirs = chosen if split == "train" else chosen[:0]
    return pixels.images(torch.from_numpy(chosen), split), data.targets(chosen, split), theirs


def _targets(prepared: Prepared, view: View, sent: Sent, theirs: Ints, seed: int) -> list[Target]:
    """Return the features to attack: a client's prototypes, and the controls with which the prototypes are compared.

    Args:
        prepared: The experiment.
        view: The attacker's knowledge.
        sent: The prototypes that the client sent.
        theirs: The indices of training samples that the attacker has. These samples are not used as strangers.
        seed: The seed of the draws.
    """
    generator = rng(seed, "audit-targets", client=sent.client)
    labels = prepared.data.y_train.numpy()
    mine = np.sort(prepared.assignment[sent.client])
    others = np.ones(len(labels), dtype=bool)
    others[mine] = others[theirs] = False
    classes = np.flatnonzero(sent.table["samples"].numpy() > 0)
    targets: list[Target] = []
    for label in np.sort(generator.permutation(classes)[:CLASSES]).tolist():
        own, unseen = mine[labels[mine] == label], np.flatnonzero(others & (labels == label))
        sizes = [size for size in SIZES if size < len(own) for _ in range(DRAWS)]
        for number, group in enumerate([own, *(generator.choice(own, size, replace=False) for size in sizes)]):
            images = view.pixels.images(torch.from_numpy(group))
            if is_sent := number == 0:
                # The client's prototype may be the mean of fewer images than ``group`` has, because a data sampler may
                # have left some images out.
                size, feature = int(sent.table["samples"][label]), sent.table["means"][label]
            else:
                size = len(group)
                feature = features_of(view.model, view.params, view.pixels, images).mean(dim=0)
            if len(images) > COMPARED:
                images = images[np.sort(generator.choice(len(images), COMPARED, replace=False))]
            compared = torch.from_numpy(generator.permutation(unseen)[: len(images)])
            targets.append(Target(sent.client, label, size, is_sent, feature, images, view.pixels.images(compared)))
    return targets


def _attacked(
    view: View, targets: Sequence[Target], steps: int, seed: int, client: int, tell: Callable[[int, str], None]
) -> Iterator[Finding]:
    features = torch.stack([target.feature for target in targets])
    labels = torch.tensor([target.label for target in targets])
    drawn = {BASELINE: view.class_means[labels]}
    for number, (name, attack) in enumerate(ATTACKS):
        tell(number, name)
        drawn[name] = attack(view, steps, seed, client)(features, labels)
    tell(len(ATTACKS), "comparing")
    for name, images in drawn.items():
        seen = features_of(view.model, view.params, view.pixels, images)
        apart, lengths = (seen - features).norm(dim=1).tolist(), features.norm(dim=1).tolist()
        for target, image, error, length in zip(targets, images, apart, lengths, strict=True):
            yield compare(name, target, image, error / length if length else None)


def compare(attack: str, target: Target, image: Tensor, feature_error: float | None) -> Finding:
    """Compare a reconstruction with the target's images, the mean of these images, and the images in ``unseen``."""
    mean, nearest = likeness(image, target.own)
    _, average = likeness(image, target.own.mean(dim=0, keepdim=True))
    stranger = likeness(image, target.unseen)[1] if len(target.unseen) else None
    return Finding(attack, target, image, mean, nearest, stranger, average, feature_error)
