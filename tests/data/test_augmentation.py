"""Augmentations as functions of a batch, and the specs that name them."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import torch
from task_cases import Networks, data_of

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.data.augmentation import AUGMENTATIONS, CropFlip, OwnAugmentation
from fedstrata.data.dataset import from_arrays
from fedstrata.data.sources import Data


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Return images as a data set returns them, in channels-last format."""
    numbers = torch.arange(count * channels * height * width, dtype=torch.float32)
    return numbers.view(count, height, width, channels).permute(0, 3, 1, 2)


def error_of(data, augment: object, model: object = None) -> str:
    table = {"data": {"augment": augment}, "partition": {"name": "iid", "clients": 2}}
    with pytest.raises(SpecError) as caught:
        fs.prepare(fs.Experiment.from_table(table), data=data, model=model)
    return str(caught.value)


# crop-flip


def test_two_images_by_hand():
    draws = generator(716)
    assert torch.randint(-1, 2, (2, 2, 1), generator=draws).flatten().tolist() == [1, 0, -1, 1]
    assert torch.randint(2, (2, 1), generator=draws, dtype=torch.bool).flatten().tolist() == [0, 1]
    x = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[10, 20, 30], [40, 50, 60], [70, 80, 90]]])[:, None].float()
    first = [  # one row down and one column to the left; after row 3 and before column 1, the image is reflected
        [5, 4, 5],
        [8, 7, 8],
        [5, 4, 5],
    ]
    second = [  # one column to the right, and then mirrored
        [20, 30, 20],
        [50, 60, 50],
        [80, 90, 80],
    ]
    assert CropFlip(padding=1)(x, generator(716))[:, 0].tolist() == [first, second]


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
def test_it_is_numpys_reflection_a_crop_and_a_flip(padding, flip):
    x = images(30, 3, 5, 7)
    result, draws = CropFlip(padding=padding, flip=flip)(x, generator(3)), generator(3)
    down, right = torch.randint(-padding, padding + 1, (2, 30, 1), generator=draws).flatten(1).tolist()
    mirrored = torch.randint(2, (30, 1), generator=draws, dtype=torch.bool).flatten().tolist() if flip else [0] * 30
    for image, before, d, r, mirror in zip(result, x, down, right, mirrored, strict=True):
        side = (padding, padding)
        padded = np.pad(before.numpy(), ((0, 0), side, side), mode="reflect")
        crop = padded[:, padding + d : padding + d + 5, padding + r : padding + r + 7]
        np.testing.assert_array_equal(image.numpy(), crop[:, :, ::-1] if mirror else crop)


@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.float32), (3, torch.float32), (4, torch.float64)])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_shape_type_and_layout_stay(channels, dtype, count):
    x = images(count, channels, 6, 8).to(dtype)
    y = CropFlip()(x, generator())
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
    assert y.data_ptr() != x.data_ptr() or not count


def test_two_equal_flips_are_the_identity():
    x, flip = images(50, 2, 4, 5), CropFlip(padding=0)
    once = flip(x, generator(1))
    assert 10 < int((once != x).flatten(1).any(1).sum()) < 40
    assert torch.equal(flip(once, generator(1)), x)
    assert torch.equal(CropFlip(padding=0, flip=False)(x, generator(1)), x)


def test_crops_and_flips_are_uniform():
    n, p = 30_000, 2
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(7.0), indexing="ij")
    x = torch.stack([rows, columns]).expand(n, 2, 6, 7)
    y = CropFlip(padding=p)(x, generator(2))
    mirrored = y[:, 1, 2, 3] > y[:, 1, 2, 4]
    down, right = y[:, 0, 2, 3] - 2, y[:, 1, 2, 3] - 3
    cells = ((down + p) * 5 + (right + p)) * 2 + mirrored
    counts = torch.bincount(cells.long(), minlength=50)
    share = 1 / 50
    assert len(counts) == 50
    assert ((counts - n * share).abs() < 4.5 * (n * share * (1 - share)) ** 0.5).all()


def test_every_sample_draws_its_own_numbers_and_they_are_those_of_the_generator():
    x = images(1, 1, 8, 8).expand(12, 1, 8, 8)
    y = CropFlip()(x, generator(7))
    assert len({tuple(image.flatten().tolist()) for image in y}) > 9
    assert torch.equal(y, CropFlip()(x, generator(7)))
    assert not torch.equal(y, CropFlip()(x, generator(8)))


X = np.random.default_rng(0).normal(size=(12, 8, 8)).astype(np.float32)
Y = np.arange(12) % 2


def test_samples_that_are_not_images_are_refused():
    table = X.reshape(12, 64)
    assert error_of((table, Y, table, Y), "crop-flip") == (
        "data.augment = 'crop-flip': needs images (channels, height, width), but a sample has the shape (64,). "
        "Remove data.augment."
    )


def test_text_is_refused():
    problem = error_of(data_of("next-token, domains"), "crop-flip", Networks("next-token, domains"))
    assert "but a sample has ids of shape (5,). Remove data.augment." in problem


def test_images_that_are_not_larger_than_the_padding_are_refused():
    problem = "data.augment.padding = 8: must be smaller than the sides of the images, 8x8. Use a smaller padding."
    assert error_of((X, Y, X, Y), {"name": "crop-flip", "padding": 8}) == problem
    CropFlip(padding=7).check(from_arrays(X, Y, X, Y))


def test_targets_of_single_pixels_are_refused():
    problem = error_of(data_of("segmentation"), {"name": "crop-flip", "padding": 1}, Networks("segmentation"))
    assert "moves pixels, but each pixel has its own target." in problem


# A function of the user's own


def own(name: str) -> OwnAugmentation:
    augment = AUGMENTATIONS.parse(f"augmentations:{name}")
    assert isinstance(augment, OwnAugmentation)
    return augment


def test_a_function_gets_its_settings():
    x = images(4, 1, 3, 3)
    augment = AUGMENTATIONS.parse({"name": "augmentations:noise", "scale": 2.0})
    assert torch.equal(augment(x, generator()), x + 2 * torch.randn(x.shape, generator=generator()))
    assert augment.to_spec() == {"name": "augmentations:noise", "scale": 2.0}
    assert AUGMENTATIONS.parse(augment.to_spec()) == augment


def test_a_mapping_is_passed_on_as_it_is():
    x = {"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3)}
    assert own("same")(x, generator()) is x


@pytest.mark.parametrize("name", ["noise", "shift"])
def test_the_identity_of_a_run_includes_the_module(name):
    spec = fs.Experiment(data={"name": "digits", "augment": f"augmentations:{name}"})
    assert list(fs.prepare(spec).identity["code"]) == ["augmentations"]
    assert fs.prepare(fs.Experiment()).identity["code"] == {}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("halved", "returned float32 (2, 1, 8, 4) for a batch of float32 (2, 1, 8, 8). Return a batch of the same"),
        ("doubled", "returned float64 (2, 1, 8, 8) for a batch of float32 (2, 1, 8, 8). Return a batch of the same"),
        ("nothing", "returned NoneType for a batch of float32 (2, 1, 8, 8). Return a batch of the same shape and type"),
        ("listed", "returned list for a batch of float32 (2, 1, 8, 8). Return a batch of the same shape and type."),
        ("failing", "fails on a batch of float32 (2, 1, 8, 8): ZeroDivisionError: no such batch"),
        ("unseeded", "returned different batches for the same random seed. Draw all random numbers from the generator"),
        (
            "unseeded_numpy",
            "returned different batches for the same random seed. Draw all random numbers from the gene",
        ),
        ("masked", "names an object of type dict. Give the name of a function."),
        ("missing", "the module 'augmentations' does not define 'missing'. Check the name."),
    ],
)
def test_what_a_function_must_not_do(name, problem):
    key = "data.augment.name" if name in ("masked", "missing") else "data.augment"
    assert error_of((X, Y, X, Y), f"augmentations:{name}").startswith(f"{key} = 'augmentations:{name}': {problem}")


def test_a_mapping_with_other_parts_is_refused(monkeypatch):
    monkeypatch.setattr("augmentations.same", lambda x, generator: {"ids": x["ids"]})
    x = {"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3)}
    problem = r"returned \{ids: int64 \(2, 3\)\} for a batch of \{ids: int64 \(2, 3\), mask: float32 \(2, 3\)\}. Return"
    with pytest.raises(SpecError, match=problem):
        own("same")(x, generator())


def test_an_unknown_setting_of_a_function_is_refused():
    problem = error_of((X, Y, X, Y), {"name": "augmentations:noise", "power": 2})
    assert "TypeError: noise() got an unexpected keyword argument 'power'" in problem


# Specs


def test_a_spec_without_augmentation_does_not_name_it():
    assert "augment" not in fs.Experiment().to_toml()
    assert fs.Experiment().to_toml() == fs.Experiment(data={"name": "digits", "augment": None}).to_toml()


@pytest.mark.parametrize(
    "augment",
    ["crop-flip", {"name": "crop-flip", "padding": 2, "flip": False}, {"name": "augmentations:noise", "scale": 0.5}],
    ids=str,
)
def test_a_spec_is_read_again_as_it_was_written(augment):
    spec = fs.Experiment(data=Data("digits", augment=augment))
    again = fs.Experiment.from_table(tomllib.loads(spec.to_toml()))
    assert again == spec
    assert spec.to_toml() != fs.Experiment().to_toml()


@pytest.mark.parametrize(
    ("augment", "problem"),
    [
        (
            "crop-flop",
            "data.augment.name = 'crop-flop': is not a known data augmentation; did you mean 'crop-flip'? "
            "Use one of: crop-flip, or your own function as 'module:function'.",
        ),
        ("nowhere:crop", "data.augment.name = 'nowhere:crop': the module 'nowhere' was not found. Check the name and"),
        (
            {"name": "crop-flip", "pading": 2},
            "data.augment.pading = 2: is not a known key; did you mean 'padding'? Use one of: padding, flip",
        ),
        ({"name": "crop-flip", "padding": -1}, "data.augment.padding = -1: must be greater than or equal to 0."),
        ({"padding": 2}, "data.augment.name: is required, but not set. Use one of: crop-flip"),
        (4, "data.augment = 4: must be a name, or a table with the key 'name'."),
    ],
    ids=str,
)
def test_what_a_spec_cannot_name(augment, problem):
    with pytest.raises(SpecError) as caught:
        fs.Experiment.from_table({"data": {"name": "digits", "augment": augment}})
    assert str(caught.value).startswith(problem)


def test_data_of_the_users_own_keep_the_augmentation():
    spec = fs.Experiment.from_table({"data": {"augment": "crop-flip"}, "partition": {"name": "iid", "clients": 2}})
    prepared = fs.prepare(spec, data=(X, Y, X, Y))
    assert prepared.config.augment == CropFlip()
    assert prepared.spec.data.augment == CropFlip()
