# ruff: noqa: E501  the table of bad specs has one a line
from __future__ import annotations

import io
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.cli.common import WITH_OUT
from fedstrata.cli.main import parser

BASE = """[training]
rounds = 1
[partition]
clients = 10
"""

BAD = {
    "unknown key": ("[partition]\nalfa = 0.1", "partition.alfa = 0.1 (s.toml, line 2): is not a known key; did you mean 'alpha'? Use one of: clients, min_size, alpha, balance, prior."),
    "unknown section": ("seed = 1\n[trainin]\nrounds = 2", "trainin = {'rounds': 2} (s.toml, line 2): is not a known key; did you mean 'training'? Use one of: seed, data, task, partition, availability, "),
    "a word for a number": ('[training]\nrounds = "five"', "training.rounds = 'five' (s.toml, line 2): must be an integer."),
    "a fraction for a whole number": ("[training]\nrounds = 2.5", "training.rounds = 2.5 (s.toml, line 2): must be an integer"),
    "a number for a table": ("training = 3", "training = 3 (s.toml, line 1): must be a table"),
    "alpha 0": ("[partition]\nalpha = 0", "partition.alpha = 0 (s.toml, line 2): must be greater than"),
    "alpha below 0": ("[partition]\nalpha = -1.5", "partition.alpha = -1.5 (s.toml, line 2): must be greater than"),
    "more clients than samples": ("[partition]\nclients = 5000", "partition.clients = 5000 (s.toml, line 2): digits has only 1437 training samples. Use at most 1437 with min_size = 1."),
    "more invited than there are": ("[training]\nclients_per_round = 200", "training.clients_per_round = 200 (s.toml, line 2): the partition has 100 clients. Use at most 100."),
    "nobody invited": ("[training]\nclients_per_round = 0", "training.clients_per_round = 0 (s.toml, line 2): must be greater than 0"),
    "epochs and steps": ("[training]\nlocal_epochs = 2\nlocal_steps = 3", "training.local_steps = 3 (s.toml, line 3): cannot be set together with local_epochs. Set only one of the two keys."),
    "unknown method": ('[method]\nname = "fedavgg"', "method.name = 'fedavgg' (s.toml, line 2): is not a known method; did you mean 'fedavg'? Use one of: fedavg, "),
    "its spelling": ('method = "scafold"', "method.name = 'scafold' (s.toml, line 1): is not a known method; did you mean 'scaffold'? Use one of: fedavg, "),
    "unknown data": ('data = "digts"', "data.name = 'digts' (s.toml, line 1): is not a known data set; did you mean 'digits'? Use one of: digits"),
    "data that are not there": ('data = "mnist"', "mnist"),
    "a missing file of data": ('[data]\nname = "nowhere.npz"', "data.name = 'nowhere.npz': there is no file"),
    "a damaged file of data": ('[data]\nname = "damaged.npz"', "data.name = 'damaged.npz': is not a .npz file, or is damaged"),
    "unknown model": ('[model]\nname = "mlpp"', "model.name = 'mlpp' (s.toml, line 2): is not a known model; did you mean 'mlp'? Use one of: mlp, cnn, "),
    "unknown partition": ('partition = "irichlet"', "did you mean 'dirichlet'?"),
    "unknown objective": ('[method]\nobjective = "fedproxx"', "method.objective.name = 'fedproxx' (s.toml, line 2): is not a known objective; did you mean 'fedprox'? Use one of: cross-entropy, fedprox, "),
    "a setting of an objective": ('[method]\nobjective = { name = "fedprox", muu = 1 }', "method.objective.muu = 1 (s.toml, line 2): is not a known key; did you mean 'mu'? Use one of: mu."),
    "momentum with SCAFFOLD": ('method = "scaffold"\n[training]\nmomentum = 0.9', "training.momentum = 0.9 (s.toml, line 3): SCAFFOLD's control variates require plain SGD. Set training.momentum = 0."),
    "clipping with SCAFFOLD": ('method = "scaffold"\n[training]\nclip = 1.0', "training.clip = 1.0 (s.toml, line 3): SCAFFOLD's control variates require unclipped gradients. Remove the key."),
    "more strata than clients": ('[method]\nname = "fedsts"\nstrata = 200', "method.strata = 200 (s.toml, line 3): the partition has 100 clients. Use at most 100."),
    "a missing trace": ('[availability]\nname = "trace"\nfile = "no.csv"', "availability.file = 'no.csv' (s.toml, line 3): the file does not exist. Give a CSV file with the columns 'client', 'first' and 'last'."),
    "a wrong trace": ('[availability]\nname = "trace"\nfile = "wrong.csv"', "availability.file = 'wrong.csv' (s.toml, line 3): is not a valid trace of availability (line 2 must have three integers). Correct the file."),
    "groups that do not fit": ('[availability]\nname = "groups"\ngroups = [{ clients = 3, p = 0.5 }]', "availability.groups (s.toml, line 3): the groups have 3 clients in total, but partition.clients is 100. Make both numbers equal."),
    "p over 1": ('[availability]\nname = "bernoulli"\np = 1.5', "availability.p = 1.5 (s.toml, line 3): must be less than or equal to 1."),
    "a target over 1": ("[evaluation]\ntargets = [2]", "evaluation.targets = [2] (s.toml, line 2): 2.0 is not between 0 (excluded) and 1. Use fractions, such as [0.02]."),
    "a target in percent": ("[evaluation]\ntargets = [90]", "Use fractions, such as [0.9]."),
    "somebody else's key": ('[partition]\nname = "iid"\nalpha = 0.1', "partition.alpha = 0.1 (s.toml, line 3): is not a known key. The key 'alpha' belongs to dirichlet, domain, but this partition"),
    "another section's key": ("[training]\nalpha = 0.1", "The key 'alpha' belongs to partition (dirichlet, domain) and method (fedssar, feddyn, fedrs, fedgs) and "),
    "a module that is not there": ('[method]\nname = "nowhere_at_all:Thing"', "the module 'nowhere_at_all' was not found"),
    "a thing that is no method": ('[method]\nname = "os:path"', "is not a subclass of Method. Derive the class from Method."),
    "more threads than a machine has": ("[training]\nthreads = 100000", "training.threads = 100000 (s.toml, line 2): must be less than or equal to 1024."),
    "speeds beyond all numbers": ("[availability]\nspeed_spread = 10000", "availability.speed_spread = 10000 (s.toml, line 2): must be less than or equal to 10."),
    "a batch of 10^30": ("[training]\nbatch_size = 1" + 30 * "0", "is too large. Use at most 2147483647."),
    "a model larger than memory": ("[model]\nhidden = [1000000, 1000000]", "model.name = 'mlp' (s.toml, line 1): cannot be built for samples of shape (1, 8, 8): RuntimeError: "),
    "a factory that fails": ('[model]\nname = "os:listdir"', "model.name = 'os:listdir' (s.toml, line 2): cannot be"),
    "a seed of thousands of digits": ("seed = " + "9" * 4301, "spec = 's.toml': is not valid TOML: an integer has too many digits"),
    "a hexadecimal one": ("seed = 0x" + "f" * 9000, "seed = (int too large to show) (s.toml, line 1): must be less than or equal to"),
    "thousands of levels": ("a = " + "[" * 1500 + "]" * 1500, "spec = 's.toml': is not valid TOML: tables or lists are nested too deeply"),
    "thousands of parts": (".".join(["a"] * 5000) + " = 1", "a = (dict too large to show): is not a known key"),
    "no TOML": ("[method", "spec = 's.toml': is not valid TOML: "),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_one_line_and_code_2_and_nothing_is_written(capsys, case):
    text, message = BAD[case]
    Path("s.toml").write_text(text + "\n")
    Path("damaged.npz").write_bytes(b"PK\x03\x04 and then nothing")
    Path("wrong.csv").write_text("client,first,last\n1,a,2\n")
    before = sorted(Path().iterdir())
    for command in (["run", "s.toml", "--quiet"], ["run", "s.toml", "--out", "out"]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("fedstrata: error: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.toml"], "spec = 'missing.toml': the file does not exist"),
        (["run", "."], "spec = '.': cannot be read (Is a directory). Give the path of a TOML file."),
        (["run", "--set", "training.rounds"], "--set = 'training.rounds': must have the form section.key=value"),
        (["run", "--set", "=1"], "--set = '=1': must have the form section.key=value"),
        (["run", "--set", "training.rounds=many"], "training.rounds = 'many': must be an integer"),
        (["run", "--set", "training.round=3"], "training.round = 3: is not a known key"),
        (["run", "--set", "seed=1", "--set", "seed.x=1"], "--set = 'seed.x=1': seed is a value, not a section"),
        (["run", "--engine", "locl"], "engine = 'locl': is not an engine; did you mean 'local'? Use one of: local"),
        (
            ["run", "--resume", "nowhere"],
            "--resume = 'nowhere': is not a run folder, because it does not contain spec.toml",
        ),
        (["run", "--resume", "x", "--out", "y"], "--resume = 'x': cannot be combined with SPEC or --out"),
        (["partition", "--set", "partition.alpha=0"], "partition.alpha = 0: must be greater than"),
        (["compare", "--methods", "fedavgg"], "--methods = 'fedavgg': is not a known method or label"),
        (
            ["compare", "--methods", "fedavg", "--seeds", "a"],
            "--seeds = 'a': is not a list of integers. Use, for example, --seeds 0,1,2.",
        ),
        (["compare", "--methods", "fedavg", "--jobs", "0"], "--jobs = 0: must be at least 1"),
        (["compare", "--methods", "fedavg", "--set", "training.lr=0"], "training.lr = 0: must be greater"),
        (["report", "nowhere"], "folder = 'nowhere': is not a folder"),
    ],
    ids=" ".join,
)
def test_bad_arguments(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fedstrata: error: {message}")
    assert captured.err.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_as_a_process():
    def fedstrata(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "fedstrata", *arguments], capture_output=True, text=True, check=False
        )

    bad = fedstrata("run", "--set", "partition.alpha=-1")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("fedstrata: error: partition.alpha = -1: ")
    assert bad.stderr.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("fedstrata 0.")


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error():
    command = shlex.join([sys.executable, "-m", "fedstrata", "explain", "alpha"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_a_pipe_that_is_not_the_readers_is_an_error(monkeypatch, capsys):
    def broken(*_):
        raise BrokenPipeError("a worker's pipe")

    monkeypatch.setattr("fedstrata.cli.teach.explanations", broken)
    assert main(["explain", "alpha"]) == 1
    assert "a worker's pipe" in capsys.readouterr().err


def test_a_reader_that_is_gone_is_no_error(monkeypatch, capsys):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr("fedstrata.cli.teach.explanations", broken)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["explain", "alpha"]) == 0
        stream.write("what is written later is discarded")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_memory_that_is_full_is_one_line(error, monkeypatch, capsys):
    def full(*_):
        raise error

    monkeypatch.setattr("fedstrata.cli.teach.explanations", full)
    assert main(["explain", "alpha"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("fedstrata: the memory is full. Use a smaller model or batch size")
    assert shown.count("\n") == 1


def test_an_error_that_is_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    def wrong(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("fedstrata.cli.teach.explanations", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["explain", "alpha"])


def test_streams_that_are_closed_are_empty(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["explain", "alpha"]) == 0
    assert sys.stdin.read() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.slow
def test_a_terminal_of_ascii_alone_is_no_error(monkeypatch):
    shown = subprocess.run(
        [sys.executable, "-m", "fedstrata", "settings", "training"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"Learning rate ?" in shown.stdout
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    Path("s.toml").write_text(BASE + "[data]\nlimit = 100\n")
    assert main(["run", "s.toml", "--out", "größe", "--quiet"]) == 0
    terminal.flush()
    assert b"written to gr??e" in terminal.buffer.getvalue()


def test_an_error_of_somebody_elses_code_is_one_line_too(capsys, monkeypatch):
    Path("trips.py").write_text("raise ValueError('one\\ntwo\\nthree')\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", sys.path)
    assert main(["run", "--set", "method=trips:Method"]) == 2
    error = capsys.readouterr().err
    assert (
        "method.name = 'trips:Method': importing the module fails with ValueError: one two three. Correct the" in error
    )
    assert error.count("\n") == 1


def test_without_a_command_the_help_shows_each_command_in_one_group(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    shown = re.findall(r"^  ([a-z]+) +[a-z]", capsys.readouterr().out.partition("\noptions:")[0], flags=re.MULTILINE)
    commands = next(action for action in parser()._actions if action.choices)
    assert sorted(shown) == sorted(commands.choices)


def test_usage_errors_have_code_2(capsys):
    for arguments, message in {
        ("compar",): "COMMAND = 'compar': is not a command; did you mean 'compare'? List all commands with",
        ("walk",): "COMMAND = 'walk': is not a command. List all commands with 'fedstrata --help'.",
        ("run", "--sett", "a=1"): "--sett: is not an argument of 'fedstrata run'; did you mean '--set'? ",
        ("run", "--nonsense"): "--nonsense: is not an argument of 'fedstrata run'. List all arguments with ",
    }.items():
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"fedstrata: error: {message}")
        assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("work", "arguments", "after"),
    [
        (
            "fedstrata.experiments.run.run",
            ["run"],
            ". To continue from the last checkpoint, use 'fedstrata run --resume DIR'.",
        ),
        ("fedstrata.experiments.compare.compare", ["compare", "--methods", "fedavg"], f". {WITH_OUT}"),
        (
            "fedstrata.experiments.sweep.sweep",
            ["sweep", "--set", "evaluation.validation=0.1", "--set", "training.lr=0.1,0.2"],
            f". {WITH_OUT}",
        ),
        ("fedstrata.data.partitions.picture.draw_partition", ["partition", "--set", "data=digits"], "\n"),
    ],
)
def test_an_interrupted_command_says_how_it_goes_on(work, arguments, after, capsys, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, interrupt)
    assert main(arguments) == 130
    assert capsys.readouterr().err.rpartition("fedstrata: interrupted")[2].startswith(after)


def test_what_the_system_refuses_is_one_line(capsys):
    Path("s.toml").write_text(BASE)
    Path("file").write_text("")
    assert main(["run", "s.toml", "--out", "file/run", "--quiet"]) == 2
    assert (
        "out = 'file/run': the folder cannot be created: Not a directory. Give another folder."
        in capsys.readouterr().err
    )
    assert main(["partition", "s.toml", "--out", "file/picture.png"]) == 1
    assert re.match(r"fedstrata: \S*file\S*: (File exists|Not a directory)\n", capsys.readouterr().err)


def test_a_full_disk_is_named_with_the_file(capsys):
    Path("s.toml").write_text(BASE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert main(["run", "s.toml", "--out", "out", "--quiet"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(r"fedstrata: out/\w+\.\w+: File too large\n", capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.slow
def test_a_full_memory_is_one_line(tmp_path):
    spec = 'model = { name = "mlp", hidden = [4000, 4000] }\ntraining = { rounds = 1, workers = 1 }\n'
    (tmp_path / "spec.toml").write_text(spec)
    limit = "import resource, sys; import torch; from fedstrata.cli import main; "
    # As much address space as is in use now, and 150 MB more: less than three copies of the model.
    limit += "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    limit += "resource.setrlimit(resource.RLIMIT_AS, (used + 150_000_000,) * 2); sys.exit(main(['run', 'spec.toml', '--quiet']))"
    done = subprocess.run([sys.executable, "-c", limit], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("fedstrata: the memory is full. Use a smaller model")


@pytest.mark.slow
def test_a_nul_character_is_an_error_in_one_line(capsys):
    Path("s.toml").write_text(BASE + '[compare."a\\u0000b".method]\nname = "fedavg"\n')
    for command in ("run", "compare", "partition"):
        with pytest.raises(SystemExit, match="2"):
            main([command, "s.toml", "--out", "a\0b"])
        assert "an argument contains a NUL character" in capsys.readouterr().err
    assert main(["compare", "s.toml", "--quiet", "--jobs", "1"]) == 2
    assert (
        "--methods = 'a\\x00b': labels become names of folders, but this label is reserved or not suitable. Use"
        in capsys.readouterr().err
    )


def test_data_in_the_home_of_an_unknown_user(capsys, monkeypatch):
    monkeypatch.setenv("FEDSTRATA_DATA", "~nobodyx/x")
    assert main(["datasets"]) == 2
    assert capsys.readouterr().err == (
        "fedstrata: error: FEDSTRATA_DATA = '~nobodyx/x': the user after '~' does not exist. Set FEDSTRATA_DATA to the path of a folder.\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="closes standard output as a shell does")
def test_a_closed_standard_output(tmp_path):
    for closed in (">&-", ">&- 2>&-", "<&- >&- 2>&-"):
        command = f"{sys.executable} -m fedstrata datasets {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), closed
