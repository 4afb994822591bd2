"""An audit on paper: a table for the terminal and for Markdown, everything as JSON, and a contact sheet."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstrata.audits.attacks import ATTACKS
from fedstrata.audits.prototypes import BASELINE, Audit, Finding
from fedstrata.audits.similarity import Likeness
from fedstrata.base.jsonl import replace_file, write_json

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

NAME = "prototypes"
ROWS = 8
"""Prototypes on the contact sheet, at most."""
Pick = Callable[[Finding], "Likeness | None"]
AGAINST: dict[str, Pick] = {
    "mean": lambda f: f.mean,
    "nearest": lambda f: f.nearest,
    "stranger": lambda f: f.stranger,
    "average": lambda f: f.average,
}
"""What a reconstruction is compared with: all images behind the feature, the nearest, the nearest stranger, their
average."""
HEADINGS = ("feature of", "attack", "PSNR mean", "nearest", "stranger", "average", "SSIM mean", "nearest", "stranger",
            "average", "feature error")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One attack against all targets of one kind.

    Args:
        feature: What the targets are.
        attack: The attack.
        targets: How many there are.
        psnr: Mean over the targets, in dB, by what a reconstruction is compared with.
        ssim: The same for SSIM.
        feature_error: The same for the relative error of the feature, where it has a length; None where none has.
    """

    feature: str
    attack: str
    targets: int
    psnr: dict[str, float | None]
    ssim: dict[str, float | None]
    feature_error: float | None


def rows(audit: Audit) -> list[Row]:
    """The table: controls from single images on, then the prototypes; in each the baseline, then the attacks."""
    kinds = sorted({_kind(finding) for finding in audit.findings})
    return [
        _row(kind, attack, members)
        for kind in kinds
        for attack in (BASELINE, *(name for name, _ in ATTACKS))
        if (members := [f for f in audit.findings if _kind(f) == kind and f.attack == attack])
    ]


def _kind(finding: Finding) -> tuple[bool, int]:
    """Prototypes last; controls by their size."""
    return finding.target.sent, 0 if finding.target.sent else finding.target.size


def _row(kind: tuple[bool, int], attack: str, members: Sequence[Finding]) -> Row:
    sizes = sorted({finding.target.size for finding in members})
    span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    feature = f"prototype ({span} images)" if kind[0] else "1 image" if kind[1] == 1 else f"{kind[1]} images"
    return Row(
        feature,
        attack,
        len(members),
        {key: _mean(of.psnr for f in members if (of := pick(f))) for key, pick in AGAINST.items()},
        {key: _mean(of.ssim for f in members if (of := pick(f))) for key, pick in AGAINST.items()},
        _mean(finding.feature_error for finding in members if finding.feature_error is not None),
    )


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def cells(row: Row) -> list[str]:
    """A row of the table as text."""
    psnr = ["–" if value is None else f"{value:.1f}" for value in row.psnr.values()]
    rest = ["–" if value is None else f"{value:.2f}" for value in (*row.ssim.values(), row.feature_error)]
    return [row.feature, row.attack, *psnr, *rest]


def caption(audit: Audit) -> str:
    """What was done, in one sentence."""
    who = ", ".join(f"{one.client} (round {one.round})" for one in audit.sent)
    source = "the test set" if audit.held_out == "test" else "training samples that no client holds"
    return (
        f"{audit.method} on {audit.data}: prototypes of clients {who}; the attacker has {audit.held_out_images:,} "
        f"images from {source}; {audit.steps} steps an attack, seed {audit.seed}."
    )


def to_rich(audit: Audit) -> Table:
    """The main columns, for a terminal of 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("reconstruction from")
    for heading in ("PSNR", "nearest", "stranger", "SSIM", "nearest", "stranger"):
        table.add_column(heading, justify="right")
    last = ""
    for row in rows(audit):
        if row.feature != last:
            table.add_row(f"[bold]{row.feature}[/]")
            last = row.feature
        _, attack, *numbers = cells(row)
        table.add_row(f"  {attack}", *numbers[:3], *numbers[4:7])
    return table


def to_markdown(audit: Audit) -> str:
    """The table for a page."""
    lines = [HEADINGS, ["---"] * 2 + ["---:"] * (len(HEADINGS) - 2), *map(cells, rows(audit))]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{caption(audit)}\n\n{table}\n\n![contact sheet]({NAME}.png)\n"


def to_json(audit: Audit) -> dict[str, Any]:
    """Settings, table and every single finding."""
    return {
        "method": audit.method,
        "data": audit.data,
        "held_out": audit.held_out,
        "held_out_images": audit.held_out_images,
        "steps": audit.steps,
        "seed": audit.seed,
        "clients": [
            {"client": one.client, "round": one.round, "difference_from_stored": one.difference} for one in audit.sent
        ],
        "table": [vars(row) for row in rows(audit)],
        "findings": [
            {
                "client": f.target.client,
                "class": audit.class_names[f.target.label],
                "prototype": f.target.sent,
                "images": f.target.size,
                "attack": f.attack,
                "psnr": {key: of.psnr if (of := pick(f)) else None for key, pick in AGAINST.items()},
                "ssim": {key: of.ssim if (of := pick(f)) else None for key, pick in AGAINST.items()},
                "feature_error": f.feature_error,
            }
            for f in audit.findings
        ],
    }


def write(audit: Audit, out: Path) -> None:
    """Write ``prototypes.json``, ``prototypes.md`` and ``prototypes.png`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{NAME}.json", to_json(audit))
    replace_file(out / f"{NAME}.md", to_markdown(audit).encode())
    draw_sheet(audit, out / f"{NAME}.png")


def draw_sheet(audit: Audit, path: Path) -> None:
    """The contact sheet: what the attacks draw from prototypes, and from the feature of a single image of each."""
    from matplotlib.figure import Figure

    names = [name for name, _ in ATTACKS]
    pairs = _pairs(audit)[:ROWS]
    headings = ["average of\nits images", BASELINE, *names, "one of\nits images", *names]
    widths = [1.0] * (2 + len(names)) + [0.25] + [1.0] * (1 + len(names))
    size = (1.05 * sum(widths) + 1.0, 1.08 * len(pairs) + 0.9)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(len(pairs), len(widths), squeeze=False, width_ratios=widths)
    for line, (sent, single) in zip(grid, pairs, strict=True):
        target, alone = sent[BASELINE].target, single[BASELINE].target
        left = [target.own.mean(dim=0), sent[BASELINE].image, *(sent[name].image for name in names)]
        right = [alone.own[0], *(single[name].image for name in names)]
        for axes, image in zip(line, [*left, None, *right], strict=True):
            axes.axis("off")
            if image is not None:
                _show(axes, image)
        name = audit.class_names[target.label]
        text = f"client {target.client}\n{name}\n{target.size} images"
        line[0].text(-0.08, 0.5, text, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    top = [axes for place, axes in enumerate(grid[0]) if place != 2 + len(names)]
    for axes, heading in zip(top, headings, strict=True):
        axes.set_title(heading.replace(" ", "\n", 1) if "\n" not in heading else heading, fontsize=8)
    figure.suptitle("from the prototype (left) and, as a control, from the feature of one image (right)", fontsize=9)
    figure.savefig(path)


def _pairs(audit: Audit) -> list[tuple[dict[str, Finding], dict[str, Finding]]]:
    """Every prototype, and the first single image of the same client and class."""
    found: dict[tuple[int, int, bool], dict[str, Finding]] = {}
    for finding in audit.findings:
        target = finding.target
        if target.sent or target.size == 1:
            found.setdefault((target.client, target.label, target.sent), {}).setdefault(finding.attack, finding)
    return [
        (members, found.get((client, label, False), members))
        for (client, label, sent), members in found.items()
        if sent
    ]


def _show(axes: Any, image: Tensor) -> None:
    picture = image.permute(1, 2, 0).clamp(0, 1)
    grey = picture.shape[2] != 3
    pixels = (picture.mean(dim=2) if grey else picture) * 255
    axes.imshow(pixels.round().to(torch.uint8).numpy(), cmap="gray" if grey else None, vmin=0, vmax=255)
