from __future__ import annotations

import sys

import pytest
import torch

from fedstrata.audits.similarity import CEILING, likeness, psnr, ssim
from fedstrata.base.errors import ExtraMissingError

BLACK, WHITE = torch.zeros(1, 8, 8), torch.ones(1, 8, 8)


def grey(value: float, channels: int = 1) -> torch.Tensor:
    return torch.full((channels, 8, 8), value)


def test_psnr_is_ten_log_of_one_over_the_mean_square():
    assert psnr(BLACK, WHITE) == pytest.approx(0.0)
    assert psnr(BLACK, grey(0.1)) == pytest.approx(20.0, abs=1e-5)
    half = BLACK.clone()
    half[:, :, :4] = 0.2  # mean square 0.02
    assert psnr(BLACK, half) == pytest.approx(16.9897, abs=1e-4)
    assert psnr(WHITE, WHITE) == CEILING


def test_ssim_of_flat_images_is_the_luminance_term():
    c1 = 0.01**2
    assert ssim(WHITE, WHITE) == pytest.approx(1.0)
    assert ssim(BLACK, WHITE) == pytest.approx(c1 / (1 + c1))
    assert ssim(grey(0.2), grey(0.4)) == pytest.approx((2 * 0.08 + c1) / (0.04 + 0.16 + c1), abs=1e-6)


def test_ssim_is_the_mean_over_channels():
    colour = torch.cat([WHITE, WHITE, BLACK])
    c1 = 0.01**2
    assert ssim(colour, grey(1.0, 3)) == pytest.approx((2 + c1 / (1 + c1)) / 3)


def test_ssim_sees_structure_that_psnr_does_not():
    stripes = torch.tensor([0.25, 0.75]).repeat(4).expand(1, 8, 8)
    brighter, blurred = stripes + 0.25, grey(0.5)
    assert psnr(stripes, brighter) == pytest.approx(psnr(stripes, blurred), abs=1e-4)
    assert ssim(stripes, brighter) > 0.9 > 0.1 > ssim(stripes, blurred)


def test_mean_and_nearest_over_several_images():
    mean, nearest = likeness(BLACK, torch.stack([grey(0.1), grey(1.0), grey(0.01)]))
    assert mean.psnr == pytest.approx((20 + 0 + 40) / 3, abs=1e-4)
    assert nearest.psnr == pytest.approx(40, abs=1e-4)
    assert nearest.ssim == pytest.approx(ssim(BLACK, grey(0.01)))


def test_without_scikit_image_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'fedstrata\[audit\]'"):
        psnr(BLACK, WHITE)
