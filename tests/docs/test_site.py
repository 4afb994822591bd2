"""The site: built strictly from the repository alone, and every link of it followed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import deque
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import PROGRAM, browser

import fedstrata
from fedstrata.base.style import ACCENT

pytest.importorskip("sphinx", reason="the site needs the extra docs")
ROOT = Path(__file__).parents[2]
GENERATED = ("gallery", "concepts", "architecture.md", "changelog.md", "contributing.md", "security.md", "tables")


class Page(HTMLParser):
    """What a page links to, what it loads, and where in it links may lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "source", "iframe") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "source" and found.get("srcset"):
            self.loads.append(found["srcset"])
        if (
            tag == "link"
            and found.get("href")
            and found.get("rel") not in ("search", "author", "next", "prev", "index")
        ):
            self.loads.append(found["href"])


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_files_beside_the_code_lead_to_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)#\s]+)|src(?:set)?="([^"]+)"', text)
    files = [link or picture for link, picture in links if not (link or picture).startswith(("http", "mailto"))]
    assert [file for file in files if not (ROOT / file).exists()] == []


def build(folder: Path, execute: bool) -> Path:
    """The site of a copy of docs, beside links to everything else that it reads."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns(*GENERATED))
    for path in ROOT.iterdir():
        if path.name not in ("docs", "build", ".git") and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    options = [] if execute else ["-D", "plot_gallery=0"]
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-W", "--keep-going", *options, "docs", "site"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def check(site: Path) -> dict[Path, Page]:
    """Follow every link."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    broken = []
    for path, page in pages.items():
        for link in page.loads:
            assert not urlsplit(link).netloc, f"{path.name} loads {link} from elsewhere"
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {"", unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)
    return pages


def clicks(site: Path, pages: dict[Path, Page]) -> dict[Path, int]:
    """How many clicks each page is from the first one."""
    far, waiting = {site / "index.html": 0}, deque([site / "index.html"])
    while waiting:
        path = waiting.popleft()
        for link in pages[path].links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve()
            if not parts.netloc and parts.path and target in pages and target not in far:
                far[target] = far[path] + 1
                waiting.append(target)
    return far


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"), execute=False)


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_no_link_is_broken_and_every_page_is_two_clicks_away(site):
    pages = check(site)
    far = clicks(site, pages)
    moved = {site / f"{old}.html" for old in runpy.run_path(str(ROOT / "docs" / "conf.py"))["MOVED"]}
    own = {path for path in pages if path.name not in ("genindex.html", "search.html", "py-modindex.html")} - moved
    assert {path.relative_to(site).as_posix(): far.get(path) for path in own if far.get(path, 9) > 2} == {}
    assert len(own) > 50


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_old_addresses_lead_to_pages(site):
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    for old, new in settings["redirects"].items():
        text = (site / f"{old}.html").read_text(encoding="utf-8")
        assert f"url={new}" in text
        assert ((site / old).parent / new).is_file(), (old, new)


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_every_public_name_has_its_entry_and_the_search_finds_it(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {name for kind in ("py:class", "py:function", "py:exception") for name in inventory.data.get(kind, {})}
    missing = [name for name in fedstrata.__all__ if name != "__version__" and f"fedstrata.{name}" not in described]
    assert missing == []
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("dirichlet", "neyman", "placehold"):
        assert word in index


@pytest.mark.long
def test_with_the_gallery_executed(tmp_path):
    site = build(tmp_path, execute=True)
    check(site)
    for folder in ("gallery", "concepts"):
        for page in (ROOT / "examples" / folder).glob("*.py"):
            text = (site / folder / f"{page.stem}.html").read_text(encoding="utf-8")
            assert "sphx_glr_" in text or "sphx-glr-script-out" in text, page.name


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_the_search_finds_dropout_in_the_title_of_its_guide(site):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    assert "guides/dropouts" in {index["docnames"][page] for page in index["titleterms"]["dropout"]}


def test_dropout_has_one_spelling():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    assert [path.name for path in pages if re.search("drop-out", path.read_text(encoding="utf-8"), re.I)] == []


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_signatures_have_types_that_a_reader_can_write_and_a_summary_comes_first(site):
    for page in sorted((site / "reference").glob("api-*.html")):
        text = page.read_text(encoding="utf-8")
        signatures = [re.sub("<[^>]+>", "", each) for each in re.findall(r'<dt class="sig.*?</dt>', text, re.DOTALL)]
        assert not [each for each in signatures if re.search(r"Annotated|object at|fedstrata\.|&lt;factory", each)]
        assert text.index('class="autosummary') < text.index('<dl class="py')
    methods = (site / "reference" / "api-methods.html").read_text(encoding="utf-8")
    proximal = re.search(r'<dt class="sig[^>]*id="fedstrata.FedProx">.*?</dt>', methods, re.DOTALL)
    assert re.search(r"mu:\s*float\s*=\s*0.01", re.sub("<[^>]+>", "", proximal[0]))


@pytest.mark.long
@pytest.mark.xdist_group("site")
def test_each_page_of_the_gallery_has_a_square_picture_of_its_own_and_a_text(site):
    Image = pytest.importorskip("PIL.Image")
    for folder in ("gallery", "concepts"):
        pages = {page.stem for page in (ROOT / "examples" / folder).glob("*.py") if not page.stem.startswith("own_")}
        pictures = {name: site / "_images" / f"sphx_glr_{name}_thumb.png" for name in pages}
        for path in pictures.values():
            with Image.open(path) as picture:
                assert picture.width == picture.height
        assert len({path.read_bytes() for path in pictures.values()}) == len(pages)
        texts = re.findall(
            r'class="sphx-glr-thumbcontainer" tooltip="([^"]+)"', (site / folder / "index.html").read_text()
        )
        assert len(texts) == len(pages)


@pytest.mark.long
@pytest.mark.xdist_group("site")
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_links_and_copy_buttons_can_be_seen_in_both_themes(site, theme, tmp_path):
    with browser(tmp_path) as page:
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        page.send("Page.navigate", url=(site / "start" / "first-comparison.html").as_uri())
        page.wait("document.querySelector('button.copybtn') !== null")
        colour = page.value("getComputedStyle(document.querySelector('article p a')).color")
        assert "#{:02x}{:02x}{:02x}".format(*map(int, re.findall(r"\d+", colour)[:3])) == getattr(ACCENT, theme)
        assert float(page.value("getComputedStyle(document.querySelector('button.copybtn')).opacity")) >= 0.5


@pytest.mark.long
@pytest.mark.xdist_group("site")
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_claims_can_be_filtered_by_keyboard(site, tmp_path):
    shown = "[...document.querySelectorAll('details.claim')].filter(e => e.checkVisibility()).map(e => e.className)"
    with browser(tmp_path) as page:
        page.send("Page.navigate", url=(site / "results" / "claims.html").as_uri())
        page.wait("document.querySelector('.filter :checked') !== null")
        everything = page.value(shown)
        page.value("document.querySelector('.filter :checked').focus()")
        for verdict in ("confirmed", "partly"):
            page.press("ArrowRight", 39)
            assert page.value(shown) == [each for each in everything if each == f"claim {verdict}"] != []
        for key in ("ArrowLeft", "ArrowLeft"):
            page.press(key, 37)
        assert page.value(shown) == everything


@pytest.mark.long
@pytest.mark.xdist_group("site")
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_first_page_has_a_narrow_picture_on_narrow_screens(site, theme, tmp_path):
    drawn = "[...document.querySelectorAll('picture img')].filter(e => e.checkVisibility()).map(e => e.currentSrc)"
    with browser(tmp_path) as page:
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        for width, name in ((1400, f"difference-{theme}"), (420, f"difference-narrow-{theme}")):
            page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            page.send("Page.navigate", url=(site / "index.html").as_uri())
            page.wait("document.readyState === 'complete'")
            page.value("document.querySelectorAll('picture img').forEach(each => each.loading = 'eager')")
            assert [Path(each).stem for each in page.value(drawn)] == [name]


def test_no_line_of_a_page_is_a_comment_by_mistake():
    # MyST leaves out lines that begin with a percent sign, such as the second line of "95\n% of the clients".
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "build" not in path.parts]
    assert not [path for path in pages if re.search(r"^%", path.read_text(encoding="utf-8"), re.MULTILINE)]
