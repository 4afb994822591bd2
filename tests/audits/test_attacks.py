from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.audits.attacks import ATTACKS, TUNING, View, feature_matching, match, total_variation
from fedstrata.audits.decoders import UpConvolutional, Variational, fit
from fedstrata.audits.pixels import Pixels
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng, torch_seeded
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.models.model import Model


def dataset(kind: str = "bytes", side: int = 8, channels: int = 1) -> Dataset:
    generator = np.random.default_rng(0)
    x = generator.integers(256, size=(240, side, side, channels)).astype(np.uint8)
    if kind == "floats":
        x = (x / 100 - 1).astype(np.float32)
    return from_arrays(x[:40], np.arange(40) % 2, x[40:], np.arange(200) % 2)


@pytest.mark.parametrize("kind", ["bytes", "floats"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_lead_to_what_the_model_sees(kind, channels):
    data = dataset(kind, channels=channels)
    pixels = Pixels.of(data)
    images = pixels.images(torch.tensor([3, 1]))
    assert images.shape == (2, channels, 8, 8)
    assert 0 <= float(images.min()) < 0.1
    assert 0.9 < float(images.max()) <= 1
    torch.testing.assert_close(pixels.inputs(images), data.inputs(np.array([3, 1])), atol=1e-5, rtol=0)


def test_pixels_of_tables_and_of_tiny_images_are_refused():
    table = from_arrays(np.eye(4), np.arange(4), np.eye(4), np.arange(4))
    for data in (table, dataset(side=6)):
        with pytest.raises(
            SpecError, match="the audit requires images of at least 7x7 pixels, but the samples have the"
        ):
            Pixels.of(data)


def blended() -> Dataset:
    """Images that are blends of six patterns."""
    generator = np.random.default_rng(0)
    patterns = generator.normal(size=(6, 64))
    x = 255 / (1 + np.exp(-generator.normal(size=(240, 6)) @ patterns))
    x = x.astype(np.uint8).reshape(240, 8, 8)
    return from_arrays(x[:40], np.arange(40) % 2, x[40:], np.arange(200) % 2)


def view() -> View:
    """The features of an image are its pixels, rotated: nothing of it is lost."""
    data = blended()
    pixels = Pixels.of(data)
    with torch_seeded(0, "model"):
        body = nn.Linear(64, 64, bias=False)
        nn.init.orthogonal_(body.weight)
        model = Model(nn.Sequential(nn.Flatten(), body, nn.Linear(64, 2)))
    return View.of(model, model.params(), pixels, pixels.images(slice(None), "test"), data.y_test)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean())


def test_what_the_attacker_has():
    v = view()
    assert v.features.shape == (200, 64)
    torch.testing.assert_close(v.class_means[1], v.images[1::2].mean(dim=0))
    features, images = v.for_training
    assert len(features) == len(images) == 200 - TUNING
    torch.testing.assert_close(v.seen(v.images[:3]), v.features[:3])


@pytest.mark.slow
def test_matching_finds_the_image_of_a_feature_that_determines_it():
    v = view()
    start = v.class_means[v.labels[:4]]
    found = match(v, v.features[:4], start, steps=200, alpha=0.0)
    assert error(found, v.images[:4]) < 0.02 * error(start, v.images[:4])


@pytest.mark.slow
def test_matching_treats_every_image_alone():
    v = view()
    both = match(v, v.features[:2], v.class_means[v.labels[:2]], steps=20, alpha=0.01)
    alone = match(v, v.features[1:2], v.class_means[v.labels[1:2]], steps=20, alpha=0.01)
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_prior_smooths():
    v = view()
    start = v.class_means[v.labels[:2]]
    rough, smooth = (match(v, v.features[:2], start, steps=60, alpha=alpha) for alpha in (0.0, 3.0))
    assert (total_variation(smooth) < 0.7 * total_variation(rough)).all()


@pytest.mark.slow
def test_matching_chooses_its_prior_by_held_out_images(monkeypatch):
    v = view()
    monkeypatch.setattr("fedstrata.audits.attacks.PRIORS", (3.0, 0.0, 1.0))
    found = feature_matching(v, 60, 0, 0)(v.features[:2], v.labels[:2])
    # Nothing is lost, so that here no prior is the best one.
    torch.testing.assert_close(
        found, match(v, v.features[:2], v.class_means[v.labels[:2]], steps=60, alpha=0.0), atol=1e-5, rtol=0
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack"), ATTACKS)
def test_every_attack_beats_the_class_mean_where_features_tell_all(name, attack):
    v = view()
    own, labels = v.pixels.images(slice(10)), v.pixels.data.y_train[:10]
    invert = attack(v, 60, 0, 0)
    found = invert(v.seen(own).detach(), labels)
    assert found.shape == own.shape
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    assert error(found, own) < 0.5 * error(v.class_means[labels], own)
    again = attack(v, 60, 0, 0)(v.seen(own).detach(), labels)
    assert torch.equal(found, again)
    if name != "feature matching":  # which draws nothing
        assert not torch.equal(found, attack(v, 60, 1, 0)(v.seen(own).detach(), labels))


@pytest.mark.parametrize("shape", [(1, 7, 7), (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 65, 50)])
def test_decoders_draw_any_size(shape):
    for decoder in (UpConvolutional(5, shape), Variational(5, shape)):
        assert decoder(torch.zeros(2, 5)).shape == (2, *shape)


def test_the_variational_bound_by_hand():
    decoder = Variational(1, (1, 8, 8), code=2, deviation=0.5)
    for parameter in decoder.parameters():
        nn.init.zeros_(parameter)
    # A code with mean 0 and variance 1 costs nothing; the image is grey: 64 pixels off by 0.5.
    black = torch.zeros(3, 1, 8, 8)
    assert decoder.loss(torch.ones(3, 1), black).item() == pytest.approx(64 * 0.25 / (2 * 0.25))
    nn.init.constant_(decoder.mean.bias, 2.0)
    nn.init.constant_(decoder.log_variance.bias, 1.0)
    divergence = 2 * 0.5 * (4 + np.e - 1 - 1)
    assert decoder.loss(torch.ones(3, 1), black).item() == pytest.approx(32 + divergence, rel=1e-5)


@pytest.mark.slow
def test_training_a_decoder_lowers_its_loss():
    v = view()
    with torch_seeded(0, "decoder"):
        decoder = UpConvolutional(64, (1, 8, 8))
        before = decoder.loss(v.features, v.images).item()
        fit(decoder, v.features, v.images, steps=60, generator=rng(0, "batches"))
    assert decoder.loss(v.features, v.images).item() < 0.5 * before
