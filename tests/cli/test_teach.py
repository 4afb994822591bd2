"""What helps to begin: files that run as they are written, keys that are explained, and completion in real shells."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.cli import completers, main
from fedstrata.cli.known import known
from fedstrata.cli.main import parser
from fedstrata.cli.teach import KINDS, SHELLS, explanations, words

SMALL = ["--set", "training.rounds=2", "--set", "training.local_steps=2", "--set", "partition.clients=10"]
PARTS = {
    "method": ("method", "Steady", "mu"),
    "sampler": ("method.client_sampler", "LongestAway", "spread"),
    "data-sampler": ("method.data_sampler", "Half", "share"),
    "objective": ("method.objective", "Smoothed", "smoothing"),
    "aggregator": ("method.aggregator", "BySquareRoot", "power"),
    "availability": ("availability", "Nights", "day"),
    "partition": ("partition", "Leaning", "share"),
    "task": ("task", "Quantile", "level"),
}


@pytest.fixture(autouse=True)
def _modules_of_here(monkeypatch):
    """Each test has files of its own, under the same names."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield
    here = f"{Path.cwd()}/"
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            del sys.modules[name]


@pytest.mark.slow
def test_there_is_a_test_for_each_kind():
    assert {*PARTS, "spec", "demo", "metric"} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_runs_as_it_is_written_and_has_its_setting(kind, capsys):
    section, name, key = PARTS[kind]
    module = f"taught_{kind.replace('-', '_')}"
    assert main(["new", kind, f"{module}.py"]) == 0
    assert f"{module}:{name}" in capsys.readouterr().out
    assert main(["settings", section, f"{module}:{name}"]) == 0
    assert key in capsys.readouterr().out
    more = [] if section == "partition" else ["--set", "partition.clients=10"]
    more += ["--set", "partition=iid"] if section == "task" else []
    given = ["--set", f"{section}={module}:{name}", *SMALL[:4], *more]
    assert main(["run", *given, "--out", "out", "--quiet"]) == 0
    assert f"{module}:{name}" in Path("out/spec.toml").read_text()


@pytest.mark.slow
def test_a_new_partition_is_drawn_as_its_file_says(capsys):
    assert main(["new", "partition", "mine.py"]) == 0
    (line,) = [line for line in Path("mine.py").read_text().splitlines() if line.startswith("fedstrata partition")]
    assert main(line.split()[1:]) == 0, capsys.readouterr().err
    assert Path("partition.png").is_file()


@pytest.mark.slow
def test_a_metric_is_measured(capsys):
    assert main(["new", "metric"]) == 0
    metrics = 'evaluation.metrics=["accuracy", "metric:worst_recall"]'
    assert main(["run", "--set", metrics, *SMALL, "--out", "out", "--quiet", "--json"]) == 0
    last = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= last["test"]["worst_recall"] <= last["accuracy"]


@pytest.mark.long
@pytest.mark.slow
def test_a_new_spec_and_the_demo_run(capsys):
    assert main(["new", "spec"]) == 0
    assert "fedstrata run spec.toml" in capsys.readouterr().out
    assert main(["run", "spec.toml", "--set", "training.rounds=2", "--out", "out", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    assert main(["new", "demo", "mine.toml"]) == 0
    capsys.readouterr()
    few = ["--set", "training.rounds=1", "--set", "training.clients_per_round=5", "--jobs", "1", "--quiet", "--json"]
    assert main(["compare", "mine.toml", "--methods", "fedavg,scaffold", "--out", "demo", *few]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in told["rows"]] == ["fedavg", "scaffold"]
    assert Path(told["report"]).is_file()


@pytest.mark.slow
def test_the_demo_is_that_of_the_repository(capsys):
    assert main(["new", "demo"]) == 0
    example = Path(__file__).parents[2] / "examples" / "specs" / "demo.toml"
    own, other = (
        [line for line in path.read_text().splitlines() if line[:1] != "#"] for path in (Path("demo.toml"), example)
    )
    assert own == other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "samplr"], "KIND = 'samplr': is not a kind of file; did you mean 'sampler'? Use one of: spec, demo, "),
        (["new", "sampler", "my-sampler.py"], "FILE = 'my-sampler.py': is not a name that Python can import"),
        (["new", "spec", "spec.py"], "FILE = 'spec.py': has the wrong extension. Give a name that ends in .toml"),
        (["explain", "alfa"], "KEY = 'alfa': is not a known key, section or name; did you mean 'alpha'? For a list"),
    ],
    ids=" ".join,
)
def test_mistakes(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"fedstrata: error: {message}")
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_nothing_is_written_over(capsys):
    Path("sampler.py").write_text("mine")
    assert main(["new", "sampler"]) == 2
    assert Path("sampler.py").read_text() == "mine"
    assert main(["new", "sampler", "--force", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], len(told["try"])) == ("sampler.py", 2)
    assert "LongestAway" in Path("sampler.py").read_text()


@pytest.mark.slow
def test_an_explanation_wraps_between_words(capsys, monkeypatch):
    assert main(["explain", "alpha"]) == 0
    words = set(capsys.readouterr().out.split())
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["explain", "alpha"]) == 0
    narrow = capsys.readouterr().out
    assert set(narrow.split()) == words
    assert max(map(len, narrow.splitlines())) <= 40
    assert "\n  for example: --set partition=dirichlet\n    --set partition.alpha=0.5\n" in narrow


@pytest.mark.slow
def test_a_value_is_explained_by_the_keys_that_take_it(capsys):
    assert main(["explain", "constant"]) == 0
    shown = capsys.readouterr().out
    assert "data.schema.columns.NAME.impute\n" in shown
    assert "training.schedule\n" in shown
    assert main(["explain", "training.execution"]) == 0
    assert "fused: one pass covers several clients" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_key_is_explained_with_all_who_have_it(capsys):
    assert main(["explain", "alpha"]) == 0
    shown = capsys.readouterr().out
    assert "partition.alpha of dirichlet" in shown
    assert "method.objective.alpha of feddyn" in shown
    assert "--set partition=dirichlet --set partition.alpha=0.5" in shown
    [only] = explanations("training.lr")
    assert (only["takes"], only["default"]) == ("number > 0", "0.1")
    assert explanations("partition.dirichlet")[0]["has"] == ["clients", "min_size", "alpha", "balance", "prior"]
    assert explanations("seed")[0]["section"] == ""
    assert main(["explain", "lr", "--json"]) == 0
    assert {entry["key"] for entry in json.loads(capsys.readouterr().out)} == {"lr"}


@pytest.mark.slow
def test_everything_in_a_spec_can_be_explained():
    for word in dict.fromkeys(words(known())):
        assert explanations(word), word


@pytest.mark.slow
def test_every_help_has_examples_that_can_be_parsed():
    whole = parser()
    commands = next(action for action in whole._actions if action.choices)
    for name, command in commands.choices.items():
        _, _, examples = command.format_help().partition("\nexamples:\n")
        lines = [part.split() for line in examples.splitlines() for part in line.split("&&")]
        calls = [words[words.index("fedstrata") + 1 :] for words in lines if "fedstrata" in words]
        assert any(call[0] == name for call in calls), name
        for call in calls:
            whole.parse_args([word.strip("'") for word in call])


@pytest.mark.slow
def test_every_command_has_json_but_the_one_that_prints_a_script():
    def ends(name, command):
        inner = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        return [end for each in inner for part in each.choices.items() for end in ends(*part)] or [(name, command)]

    assert {name for name, end in ends("", parser()) if "--json" not in end.format_help()} == {"completion"}


@pytest.mark.slow
def test_keys_as_json(capsys):
    assert main(["keys", "--out", "keys", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["file"]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["methods", "datasets", "settings", "settings availability", "settings method moon"]
)
def test_what_there_is_as_json(command, capsys):
    assert main([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_who_holds_what_as_json(capsys):
    assert main(["partition", "--set", "partition.clients=5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(map(sum, told["samples"])) == 1437
    assert len(told["samples"]) == 5


def candidates(line: str) -> set[str]:
    """What a shell is told, in the way argcomplete's own code in a shell asks."""
    code = "import sys; sys.argv[0] = 'fedstrata'; from fedstrata.cli import main; sys.exit(main())"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$0" 8>&1 9>/dev/null 1>/dev/null 2>/dev/null', code],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return {word.strip() for word in done.stdout.splitlines()}


def candidates_here(line: str) -> set[str]:
    """What a shell is told, without a process of its own."""
    whole = parser()
    completers.attach(whole)
    argcomplete = pytest.importorskip("argcomplete")
    quote, prefix, _, whole_words, place = argcomplete.split_line(line, len(line))
    found = argcomplete.CompletionFinder(whole)._get_completions(whole_words, prefix, quote, place)
    return {word.strip() for word in found}


@pytest.mark.slow
def test_completion_in_a_shell():
    assert candidates("fedstrata com") == {"compare", "completion"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedstrata com", {"compare", "completion"}),
        ("fedstrata explain alph", {"alpha"}),
        ("fedstrata settings availab", {"availability"}),
        ("fedstrata settings availability per", {"persistent"}),
        ("fedstrata new samp", {"sampler"}),
        ("fedstrata run --set partition.alph", {"partition.alpha="}),
        ("fedstrata compare --methods fedavg,scaf", {"fedavg,scaffold"}),
        ("fedstrata run --engine lo", {"local"}),
        ("fedstrata run --set availability.name=cy", {"availability.name=cyclic"}),
    ],
)
def test_completion(line, expected):
    assert candidates_here(line) == expected


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_code_for_a_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "fedstrata" in code
    if shell == "bash":
        Path("completion.bash").write_text(code)
        done = subprocess.run(["bash", "-n", "completion.bash"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif found := shutil.which(shell):
        Path("completion").write_text(code)
        assert subprocess.run([found, "-n", "completion"], check=False).returncode == 0
