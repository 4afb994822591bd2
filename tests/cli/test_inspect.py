from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.cli import main


@pytest.mark.slow
def test_methods_and_datasets_are_listed(capsys):
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    for name in ("fedavg", "scaffold", "fedsts", "fedstas", "stratify"):
        assert name in listed
    assert "Karimireddy" not in listed
    assert main(["methods", "--papers"]) == 0
    assert "Karimireddy" in capsys.readouterr().out
    assert main(["datasets"]) == 0
    assert "digits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_table_is_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    for command in (["methods"], ["datasets"], ["settings"], ["settings", "availability"], ["settings", "data"]):
        assert main(command) == 0
        shown = capsys.readouterr().out.splitlines()
        rows = [line for line in shown if not line.startswith("NAME.npz")]
        assert max(map(len, rows)) <= 70, command


@pytest.mark.slow
def test_settings_of_a_section_say_once_what_its_kinds_have_in_common(capsys):
    assert main(["settings", "availability"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("announced") == 1
    assert shown.index("announced") < shown.index("availability always") < shown.index("availability persistent")
    assert main(["settings", "availability", "persistent"]) == 0
    one = capsys.readouterr().out
    assert "announced" in one
    assert "period" in one
    assert "bernoulli" not in one


def test_settings_of_a_class_of_ones_own(capsys, monkeypatch):
    Path("mine_of_settings.py").write_text(
        "import fedstrata as fs\n"
        "class FedNova(fs.Recipe):\n"
        '    """Normalised updates.\n\n    Args:\n        tau: Steps that count at most.\n    """\n'
        "    tau: int = 3\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    assert main(["settings", "method", "mine_of_settings:FedNova"]) == 0
    shown = capsys.readouterr().out
    assert "Normalised updates." in shown
    [row] = [line for line in shown.splitlines() if "tau" in line]
    assert row.split() == ["tau", "integer", "3", "Steps", "that", "count", "at", "most."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["availabilty"],
            "section = 'availabilty': is not a section; did you mean 'availability'? Use one of: data, data.schema",
        ),
        (
            ["availability", "persistant"],
            "name = 'persistant': is not a name in this section; did you mean 'persistent'? Use one of: always, ",
        ),
        (["training", "os:path"], "name = 'os:path': is not a name in this section. Use one of: "),
        (["method", "os:path"], "name = 'os:path': is not a subclass of Method"),
        (
            ["method", "nowhere_at_all:Thing"],
            "name = 'nowhere_at_all:Thing': the module 'nowhere_at_all' was not found",
        ),
    ],
)
def test_settings_that_are_not_there(capsys, arguments, message):
    assert main(["settings", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fedstrata: error: {message}")
    assert captured.out == ""


@pytest.mark.slow
def test_settings_as_pages_keep_the_text_above_the_first_section(tmp_path):
    (tmp_path / "availability.md").write_text("# Mine\n\nText.\n\n## `availability`\n\nOld.\n", encoding="utf-8")
    assert main(["settings", "--markdown", str(tmp_path)]) == 0
    page = (tmp_path / "availability.md").read_text(encoding="utf-8")
    assert page.startswith("# Mine\n\nText.\n\n## `availability`\n")
    assert "### `bernoulli`" in page
    assert "Old." not in page


@pytest.mark.slow
def test_partition_prints_its_table_and_draws_it(capsys):
    assert main(["partition", "--set", "partition.clients=4", "--set", "partition.name=iid"]) == 0
    out = capsys.readouterr().out
    assert "partition.png" in out
    assert Path("partition.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().iterdir()] == ["partition.png"]


@pytest.mark.slow
def test_report_writes_a_page(capsys):
    main(["run", "--set", "training.rounds=2", "--set", "partition.clients=5", "--quiet", "--out", "one"])
    capsys.readouterr()
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out.strip() == "one/report.html"
    assert main(["report", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "one/report.html"}
    assert "<html" in Path("one/report.html").read_text()
