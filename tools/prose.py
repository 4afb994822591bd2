"""Count faults of style in texts and code, and fail if a count is above its baseline.

python tools/prose.py            # prints each count beside its baseline
python tools/prose.py --write    # lowers the baselines to today's counts
python tools/prose.py --message FILE    # checks a commit message
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("prose.json")
PAGES = ("docs/*.md", "docs/*/*.md", "*.md")
GENERATED = (
    "CHANGELOG.md",
    "docs/concepts/",
    "docs/gallery/",
    "docs/deploy/containers.md",
    "docs/project/architecture.md",
    "docs/project/changelog.md",
    "docs/project/contributing.md",
    "docs/project/security.md",
    "docs/project/writing.md",
    "docs/reference/command-line.md",
    "docs/results/",
    "docs/reference/spec/",
)
"""Pages that are not checked, because programs write them or because they no longer change."""

IDIOMS = ("is no", "unless given", "anew", "come to", "comes to", "but for")
QUESTION = re.compile(r"(?:^|(?<=[.!?:] ))(?:Who|Whoever|Whose|What)\b[^.!?\n]*[.!]", re.MULTILINE)
WRAP = re.compile(r"\n(?![ \t]*(?:\n|$|[-*|#>`:]|\d+\.|\w+: ))[ \t]*")
"""A pattern of line breaks inside a paragraph."""
COMMENT = re.compile(r"(?:^[ \t]*# .*\n?)+|(?<=\S)[ \t]+# .*", re.MULTILINE)
"""A pattern of comments, which are consecutive lines or the end of a line of code."""
SUBJECT = re.compile(r"(?=.{1,72}$)[a-z][\w, -]*: (?!\w+(?:[^e]ed|ing)\b)\w.*[^.]")
CHECKED = "8fccbc4c8849e297"
"""The subjects of the last 50 commits are checked, but only of commits after this commit."""
SHORT = 3
"""The largest number of words in a docstring's summary that counts as too short."""


def counts_of_text(text: str) -> Counter[str]:
    """Count the phrases in ``IDIOMS``, and the statements that begin with a question word."""
    text = WRAP.sub(" ", text)
    count = Counter({f"'{idiom}'": len(re.findall(rf"\b{idiom}\b", text)) for idiom in IDIOMS})
    count["statements that begin with a question word"] = len(QUESTION.findall(text))
    return +count


def counts_of_module(source: str) -> Counter[str]:
    """Count the faults in a module's comments, texts, public docstrings and identifiers."""
    nodes = list(ast.walk(ast.parse(source)))
    count = Counter[str]()
    for text in [*comments(source), *texts(nodes)]:
        count.update(counts_of_text(text))
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            count["docstring summaries of three words or fewer"] += 0 < len(summary.split()) <= SHORT
        names = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
        count["identifiers called 'found'"] += "found" in names
    return +count


def comments(source: str) -> Iterator[str]:
    """Find each comment of a module; consecutive lines are one comment."""
    return (re.sub(r"^[ \t]*# ", "", each, flags=re.MULTILINE) for each in COMMENT.findall(source))


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Find each text of a module: docstrings, errors and help."""
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def today() -> Counter[str]:
    """Count all faults in the pages, the package and the last commits."""
    count = large()
    count["commit subjects that are not 'area: imperative'"] = sum(not SUBJECT.fullmatch(line) for line in subjects())
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)}):
        if not page.relative_to(ROOT).as_posix().startswith(GENERATED):
            count += counts_of_text(page.read_text(encoding="utf-8"))
    for module in sorted((ROOT / "src").rglob("*.py")):
        count += counts_of_module(module.read_text(encoding="utf-8"))
    return +count


def large() -> Counter[str]:
    """Return the sizes of classes and functions that are larger than allowed."""
    sys.path.append(str(ROOT / "benchmarks"))
    import calls

    return Counter({f"{rule}: {name}": size for rule, sizes in calls.large().items() for name, size in sizes.items()})


def subjects() -> list[str]:
    """List the subjects of the last commits; the list is empty outside a Git repository."""
    if not (ROOT / ".git").exists():
        return []
    command = ["git", "log", "--no-merges", "--max-count=50", "--format=%s", f"{CHECKED}.."]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def risen(count: Counter[str], baseline: dict[str, int]) -> list[str]:
    """Return the names of the counts that are above their baseline."""
    return [name for name in count if count[name] > baseline.get(name, 0)]


def faults_of_message(message: str) -> list[str]:
    """List the faults of a commit message. It needs a short subject 'area: imperative', and a body."""
    subject, *rest = [line for line in message.splitlines() if not line.startswith("#")] or [""]
    faults = []
    if not SUBJECT.fullmatch(subject):
        faults.append(f"{subject!r} is not 'area: imperative' of at most 72 characters, without a full stop")
    if rest and rest[0].strip():
        faults.append("the second line is not blank")
    if not any(line.strip() for line in rest):
        faults.append("the body is missing: give the reason for the change")
    return faults


def main() -> int:
    """Compare the counts with the baseline, or check a commit message; return 1 if there is a fault."""
    if "--message" in sys.argv:
        faults = faults_of_message(Path(sys.argv[-1]).read_text(encoding="utf-8"))
        print(*faults, sep="\n")
        return int(bool(faults))
    count, baseline = today(), json.loads(BASELINE.read_text(encoding="utf-8"))
    worse = risen(count, baseline)
    for name in sorted(count | Counter(baseline)):
        print(f"{count[name]:5} (baseline {baseline.get(name, '–'):>4})  {name}{'  ROSE' if name in worse else ''}")
    if "--write" in sys.argv and not worse:
        BASELINE.write_text(json.dumps(dict(sorted(count.items())), indent=1) + "\n", encoding="utf-8")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
