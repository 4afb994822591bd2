"""Report the results of an audit of prototypes (class means of features) as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstrata.audits.attacks import ATTACKS
from fedstrata.audits.prototypes import BASELINE, Audit, Finding
from fedstrata.audits.similarity import mean_of
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.base.screen import ScreenTable
from fedstrata.reporting.tables import markdown_table

NAME = "prototypes"
ROWS = 8
"""The maximum number of prototypes on the contact sheet, a picture that shows reconstructions side by side."""
AGAINST = ("mean", "nearest", "stranger", "average")
"""The attributes of a ``Finding`` that say how similar a reconstruction is to other images."""
HEADINGS = ("feature of", "attack", "PSNR mean", "nearest", "stranger", "average", "SSIM mean", "nearest", "stranger",
            "average", "feature error")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The results of one attack on all targets (feature vectors) of one kind.

    Args:
        feature: The kind of the targets, such as prototypes or single images.
        attack: The name of the attack.
        targets: The number of targets.
        psnr: The mean PSNR over the targets, in dB, for each comparison image in ``AGAINST``.
        ssim: The mean SSIM over the targets, for each comparison image in ``AGAINST``.
        feature_error: The mean of the relative errors of the features; None if all features are 0.
    """

    feature: str
    attack: str
    targets: int
    psnr: dict[str, float | None]
    ssim: dict[str, float | None]
    feature_error: float | None


def rows(audit: Audit) -> list[Row]:
    """Return the rows of the table.

    Each kind of target has a row for the baseline and a row for each attack. The first rows contain the results for the
    controls, sorted by the number of images. A control is a feature of one or more images that serves for comparison.
    The last rows contain the results for prototypes.
    """
    kinds = sorted({_kind(finding) for finding in audit.findings})
    pairs = product(kinds, (BASELINE, *(name for name, _ in ATTACKS)))
    groups = [(*pair, [f for f in audit.findings if (_kind(f), f.attack) == pair]) for pair in pairs]
    return [_row(kind, attack, members) for kind, attack, members in groups if members]


def _kind(finding: Finding) -> tuple[bool, int]:
    """Return the kind of the attacked feature. Rows are sorted by this kind.

    For a prototype that a client sent, the kind is (True, 0). For a control (a feature that no client sent), the kind
    is (False, n), where n is the number of images from which the control was computed.
    """
    return finding.target.sent, 0 if finding.target.sent else finding.target.size


def _row(kind: tuple[bool, int], attack: str, members: Sequence[Finding]) -> Row:
    sizes = [finding.target.size for finding in members]
    span = f"{min(sizes)}" if len(set(sizes)) == 1 else f"{min(sizes)}–{max(sizes)}"
    feature = f"prototype ({span} images)" if kind[0] else "1 image" if kind[1] == 1 else f"{kind[1]} images"
    scores = [_scores(finding) for finding in members]
    psnr, ssim = ({key: mean_of(score[name][key] for score in scores) for key in AGAINST} for name in ("psnr", "ssim"))
    return Row(feature, attack, len(members), psnr, ssim, mean_of(finding.feature_error for finding in members))


def _scores(finding: Finding) -> dict[str, dict[str, float | None]]:
    """Return the PSNR and the SSIM of a reconstruction, each as a mapping from names in ``AGAINST`` to values."""
    of = {key: getattr(finding, key) for key in AGAINST}
    return {name: {key: each and getattr(each, name) for key, each in of.items()} for name in ("psnr", "ssim")}


def cells(row: Row) -> list[str]:
    """Return the strings in the cells of one row."""
    psnr = ["–" if value is None else f"{value:.1f}" for value in row.psnr.values()]
    rest = ["–" if value is None else f"{value:.2f}" for value in (*row.ssim.values(), row.feature_error)]
    return [row.feature, row.attack, *psnr, *rest]


def caption(audit: Audit) -> str:
    """Return a caption that names the run, the attacked clients, and the source of the attacker's images."""
    clients = ", ".join(f"{one.client} (round {one.round})" for one in audit.sent)
    source = "the test set" if audit.held_out == "test" else "training samples that no client has"
    return (
        f"{audit.method} on {audit.data}: prototypes of clients {clients}. The attacker has {audit.held_out_images:,} "
        f"images from {source}. Each attack took {audit.steps} steps, with seed {audit.seed}."
    )


def print_table(audit: Audit) -> None:
    """Print the caption and the main columns of the table, which fit into 80 characters per line."""
    import rich

    headings = ["reconstruction from", "PSNR", "nearest", "stranger", "SSIM", "nearest", "stranger"]
    lines, last = list[list[str]](), ""
    for row in rows(audit):
        if row.feature != last:
            lines.append([row.feature])
            last = row.feature
        _, attack, *numbers = cells(row)
        lines.append([f"  {attack}", *numbers[:3], *numbers[4:7]])
    rich.print(ScreenTable(headings, lines, more="in the Markdown table", note=caption(audit)))


def to_markdown(audit: Audit) -> str:
    """Return the caption and the table in Markdown."""
    table = markdown_table(HEADINGS, map(cells, rows(audit)), left=2)
    return f"{printable(caption(audit))}\n\n{table}\n![contact sheet]({NAME}.png)\n"


def to_json(audit: Audit) -> dict[str, Any]:
    """Return the settings, the table and all findings as values that JSON can represent."""
    settings = {key: getattr(audit, key) for key in ("method", "data", "held_out", "held_out_images", "steps", "seed")}
    return settings | {
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
                **_scores(f),
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
    """Draw the contact sheet, which has one row of images per prototype.

    The left half of a row shows reconstructions from the prototype. As a control, the right half shows reconstructions
    from the feature of a single image of the same client and class.
    """
    from matplotlib.figure import Figure

    names = [name for name, _ in ATTACKS]
    pairs = _pairs(audit)[:ROWS]
    headings = ["average of\nits images", BASELINE, *names, "one of\nits images", *names]
    widths = [1.0] * (2 + len(names)) + [0.25] + [1.0] * (1 + len(names))
    size = (1.05 * sum(widths) + 1.0, 1.08 * len(pairs) + 0.9)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(len(pairs), len(widths), squeeze=False, width_ratios=widths)
    for line, (sent, single) in zip(grid, pairs, strict=True):
        target = sent[BASELINE].target
        left = [target.own.mean(dim=0), sent[BASELINE].image, *(sent[name].image for name in names)]
        right = [single[BASELINE].target.own[0], *(single[name].image for name in names)]
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
    """Return, for each prototype, two mappings from the names of attacks to findings.

    The first mapping contains the findings about the prototype. The second mapping contains the findings about a single
    image of the same client and class.
    """
    targets: dict[tuple[int, int, bool], dict[str, Finding]] = {}
    for finding in audit.findings:
        target = finding.target
        if target.sent or target.size == 1:
            targets.setdefault((target.client, target.label, target.sent), {}).setdefault(finding.attack, finding)
    return [
        (members, targets.get((client, label, False), members))
        for (client, label, sent), members in targets.items()
        if sent
    ]


def _show(axes: Any, image: Tensor) -> None:
    picture = image.permute(1, 2, 0).clamp(0, 1)
    grey = picture.shape[2] != 3
    pixels = (picture.mean(dim=2) if grey else picture) * 255
    axes.imshow(pixels.round().to(torch.uint8).numpy(), cmap="gray" if grey else None, vmin=0, vmax=255)
