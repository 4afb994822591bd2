"""Settings of Sphinx for the site, which ``make docs`` builds from the repository; its pages load no external files."""

from __future__ import annotations

import collections.abc
import inspect
import os
import re
import shutil
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import matplotlib.pyplot as plt
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

import fedstrata
from fedstrata.base.style import style_sheet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))


class Order:
    """The order of the gallery's pages; pages that ``NAMES`` does not contain come last."""

    NAMES = [
        *("hospitals", "who_is_missing", "compose_your_own", "from_scratch", "bytes_against_accuracy"),
        *("from_flower", "from_fluke", "stratify", "fedsts_fedstas", "fedssar", "rebafl"),
    ]

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, name: str) -> tuple[int, str]:
        """Return the key by which a page is sorted."""
        stem = Path(name).stem
        return (self.NAMES.index(stem) if stem in self.NAMES else len(self.NAMES)), stem


def open_axes(settings: dict[str, Any], name: str) -> None:
    """Draw only the left and lower sides of axes, as all figures of fedstrata do."""
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}


project = "fedstrata"
author = "The fedstrata authors"
copyright = author
version = release = fedstrata.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_reredirects",
]
exclude_patterns = ["_build", "Thumbs.db", "**/README.md", "gallery/*.py", "concepts/*.py"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}

# Markdown
highlight_language = "none"  # blocks without a language are equations and outputs, not Python
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings: Google style; the types are in the signatures.
autosummary_generate = False
autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "model_config"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# Examples and their output become pages of the gallery.
sphinx_gallery_conf = {
    "examples_dirs": ["../examples/gallery", "../examples/concepts"],
    "gallery_dirs": ["gallery", "concepts"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py|/own_[a-z]+\.py",
    "within_subsection_order": Order,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
    "show_memory": False,
    "abort_on_example_error": False,
    "reset_modules": ("matplotlib", open_axes),
    "capture_repr": ("_repr_html_", "__repr__"),
    "min_reported_time": 1,
    "write_computation_times": False,
}
suppress_warnings = ["config.cache"]  # Sphinx cannot store the class in the gallery's settings

# Pages that moved: a mapping from the old address to the new address.
MOVED = {
    "benchmarks": "results/speed",
    "communication": "guides/compression",
    "data": "guides/data",
    "deploy": "deploy/index",
    "engines": "project/conformance",
    "evaluation": "guides/evaluation",
    "extending": "guides/extend",
    "glossary": "reference/glossary",
    "gpu": "guides/hardware",
    "guides/choosing": "methods/index",
    "guides/containers": "deploy/containers",
    "guides/gpu": "guides/hardware",
    "guides/notebooks": "start/first-comparison",
    "guides/tables": "guides/compare",
    "hospitals": "results/hospitals",
    "masking": "privacy/masked-labels",
    "methods": "methods/objectives",
    "privacy": "privacy/index",
    "ray": "guides/hardware",
    "reference/spec": "reference/spec/index",
    "results": "results/index",
    "results/readings": "results/claims",
    "runs": "reference/run-folder",
    "sampling": "methods/samplers",
    "spec": "reference/spec/index",
    "start/your-first-file": "start/your-csv",
    "study": "results/study",
    "tracking": "guides/tracking",
}
redirects = {old: f"{'../' * old.count('/')}{new}.html" for old, new in MOVED.items()}

# The look
html_theme = "pydata_sphinx_theme"
html_title = "fedstrata"
html_static_path = ["_static"]
html_css_files = ["palette.css", "site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": f"fedstrata {version}"},
    "github_url": "https://github.com/fedstrata/fedstrata",
    "header_links_before_dropdown": 10,
    "navbar_align": "left",
    "show_prev_next": True,
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "secondary_sidebar_items": ["page-toc"],
    "search_bar_text": "Search these pages",
}
html_sidebars = {"index": []}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")


PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/hospitals/README.md": "results/tables/hospitals_data.md",
    "examples/shakespeare/README.md": "results/tables/shakespeare.md",
    "examples/deploy/README.md": "deploy/containers.md",
    "examples/flights/README.md": "results/tables/flights.md",
    "examples/lora/README.md": "results/tables/lora.md",
} | {
    f"benchmarks/results/{path.name}": f"results/tables/{path.name}"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
}
"""A mapping from files of the repository that are also pages of the site to the paths of these pages."""

TITLES = {
    "fast_paths": "Speed of the fast paths",
    "kmeans_1d": "Exact k-means of single numbers",
    "sampler_variance": "Variance of client samplers",
    "samplers_scale": "Cost of client samplers",
}
"""Headings of pages that contain only a table."""

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")


def linked(text: str, folder: Path) -> str:
    """Return a text in which links to files in ``PAGES`` are replaced with links to their pages.

    Args:
        text: The text in Markdown.
        folder: The folder to which the links in the text are relative.
    """

    def to_page(found: re.Match[str]) -> str:
        if found[1].startswith("/"):
            return found[1]
        target = Path(os.path.normpath(folder / found[1]))
        if not target.is_relative_to(ROOT):
            return found[1]
        inside = target.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"/{PAGES[inside]}"
        # Sphinx looks for paths that begin with a slash in docs/.
        return f"/{os.path.relpath(target, ROOT / 'docs')}" if folder != ROOT / "docs" else found[1]

    return LINK.sub(to_page, text)


def write(page: Path, text: str) -> None:
    """Write a page if its text has changed, so that Sphinx builds only changed pages again."""
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def write_copies(app: Sphinx) -> None:
    """Write the pages of ``PAGES``, and add a heading to pages that do not have one."""
    for source, page in PAGES.items():
        text = linked((ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent)
        if not text.startswith("# "):
            text = f"# {TITLES.get(Path(source).stem, Path(source).stem)}\n\nSource: `{source}`.\n\n{text}"
        write(Path(app.srcdir) / page, text)


def write_palette(app: Sphinx) -> None:
    """Write the colours of ``fedstrata.base.style`` as a style sheet."""
    write(Path(app.srcdir) / "_static" / "palette.css", f"{style_sheet()}\n")


def make_demo(app: Sphinx) -> None:
    """Run the comparison of the tutorial and copy its report to the site. Finished runs stay in ``build/demo``."""
    from screens import compare

    target = Path(app.outdir) / "demo"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(compare(Path(app.srcdir).parent / "build" / "demo"), target / "report.html")


def draw_thumbnails(app: Sphinx) -> None:
    """Draw the thumbnails of the gallery, after Sphinx-Gallery has drawn its own."""
    import thumbnails

    thumbnails.write(Path(app.srcdir))


def pack_hospitals(app: Sphinx) -> None:
    """Write an archive of the example ``examples/hospitals``, for readers without a copy of the repository."""
    source, target = ROOT / "examples" / "hospitals", Path(app.srcdir) / "_static" / "hospitals.zip"
    with ZipFile(target, "w", ZIP_DEFLATED) as archive:
        for path in sorted([*source.glob("*.*"), *source.glob("sites/*.csv")]):
            inside = ZipInfo(f"examples/hospitals/{path.relative_to(source).as_posix()}")
            archive.writestr(inside, path.read_bytes(), ZIP_DEFLATED)


def relink(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace links to files in ``PAGES`` with links to their pages, on all other pages in docs."""
    folder = (ROOT / "docs" / name).parent
    if Path(app.env.doc2path(name)).suffix == ".md" and f"{name}.md" not in PAGES.values():
        source[0] = LINK.sub(lambda found: _if_copied(found[1], folder), source[0])


def _if_copied(link: str, folder: Path) -> str:
    target = Path(os.path.normpath(folder / link))
    inside = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    return f"/{PAGES[inside]}" if inside in PAGES else link


ARRAY = re.compile(r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[([^\]]+)\]\]")
"""A pattern of the long type that ``numpy.typing.NDArray`` abbreviates."""


def shorten(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return a signature with plain types, without the constraints that pydantic adds to them."""
    if isinstance(obj, type) and issubclass(obj, BaseModel):
        whole = inspect.signature(obj)
        parameters = [each.replace(annotation=plain(each.annotation)) for each in whole.parameters.values()]
        whole = whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        signature = stringify_signature(whole, unqualified_typehints=True, short_literals=True)
    if signature is not None:
        # Sphinx shows a default that a dataclass creates for each object as <factory>.
        signature = ARRAY.sub(r"~numpy.typing.NDArray[\1]", signature.replace("<factory>", "..."))
    return signature, returned if returned is None else ARRAY.sub(r"~numpy.typing.NDArray[\1]", returned)


def plain(annotation: Any) -> Any:
    """Return a type without the constraints of ``Annotated``, also inside other types.

    >>> plain(list[Annotated[int, "positive"]] | None)
    list[int] | None
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return plain(arguments[0])
    if origin in (None, typing.Literal, collections.abc.Callable):
        return annotation
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(plain, arguments))]  # noqa: UP007
    return origin[tuple(map(plain, arguments))]


ENTRY = re.compile(r"^\.\. auto(?:class|function|data|exception):: (\S+)$", re.MULTILINE)


def summarise(app: Sphinx, name: str, source: list[str]) -> None:
    """Insert a table with the first sentence of each entry before the entries of a page of the Python interface."""
    if name.startswith("reference/api-"):
        names = "\n".join(f"   {entry.removeprefix('fedstrata.')}" for entry in ENTRY.findall(source[0]))
        table = f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{names}\n```\n"
        before, heading, after = source[0].partition("\n## ")
        source[0] = f"{before}\n{table}{heading}{after}"


def write_command_line(app: Sphinx) -> None:
    """Write the page on the command line from the help of the parsers."""
    from fedstrata.cli.main import parser

    os.environ["COLUMNS"] = "100"
    whole = parser()
    lines = [
        "# The command line",
        "",
        "For every command, `--help` prints the arguments and examples. `--json` prints the result for programs,",
        "and `--quiet` hides the progress. The exit code is 0 for success, 1 for a failure, and 2 for invalid input.",
        "The exit code is 3 if a run broke down: from some round on, the server could not use any reply.",
        "The exit code is 130 if the command was interrupted, and 143 if the command was terminated.",
        "",
        "`fedstrata completion --help` shows how to complete commands with the Tab key in bash, zsh and fish.",
        "",
    ]
    commands = next(action for action in whole._actions if hasattr(action, "choices") and action.choices)
    for name, command in commands.choices.items():
        lines += [f"## `fedstrata {name}`", "", "```text", command.format_help().strip(), "```", ""]
    write(Path(app.srcdir) / "reference" / "command-line.md", "\n".join(lines))


REPAIRS = {
    # Screen readers then read the visible text of the search button, which includes the keyboard shortcut.
    re.compile(r'(<button [^>]*search-button-field[^>]*?) aria-label="Search"'): r"\1",
    # The buttons that unfold the navigation show only an icon.
    re.compile(r'<summary>(?=<span class="toctree-toggle")'): '<summary aria-label="Pages below">',
    # A signature on several lines is a list of definitions without terms.
    re.compile(r'<dl>(?=\s*<dd><em class="sig-param">)'): '<dl role="none">',
}
"""A mapping from patterns of inaccessible HTML that Sphinx and its theme write to replacements."""


def repair(app: Sphinx, error: Exception | None) -> None:
    """Apply the replacements in ``REPAIRS`` to each page, after the site is built."""
    for page in Path(app.outdir).rglob("*.html") if error is None and app.builder.format == "html" else ():
        text = page.read_text(encoding="utf-8")
        for fault, mended in REPAIRS.items():
            text = fault.sub(mended, text)
        write(page, text)


_TEXTS: dict[str, list[str]] = {}


def keep(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Store an attribute's docstring, because napoleon would read the words before a colon as a type."""
    if what == "attribute":
        _TEXTS[name] = list(lines)


def restore(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Restore the docstring that ``keep`` stored, after napoleon has changed it."""
    if what == "attribute" and name in _TEXTS:
        lines[:] = _TEXTS.pop(name)


def setup(app: Sphinx) -> None:
    """Connect the functions of this file to the events of Sphinx."""
    app.connect("autodoc-process-docstring", keep, priority=1)
    app.connect("autodoc-process-docstring", restore, priority=999)
    app.connect("builder-inited", write_command_line)
    app.connect("builder-inited", write_copies)
    app.connect("builder-inited", pack_hospitals)
    app.connect("builder-inited", write_palette)
    app.connect("builder-inited", make_demo)
    app.connect("builder-inited", draw_thumbnails, priority=900)
    app.connect("build-finished", repair)
    app.connect("source-read", relink)
    app.connect("source-read", summarise)
    app.connect("autodoc-process-signature", shorten)
