"""A site's ledger: whole after any kill, and nothing in it can be changed, cut or moved unseen."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asked
import pytest
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base.errors import DataError
from fedstrata.cli import main
from fedstrata.federation.messages import Fit
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.ledger import FILE, HEAD, HEADS, PLACE, Entry, Head, Ledger, check, heads_of, totals
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Begun, Done

WRITER = """
import sys
from pathlib import Path
from fedstrata.sites.ledger import Entry, Ledger
ledger = Ledger(Path(sys.argv[1]))
for round in range(10**6):
    head = ledger.append(Entry("spec", "Fit", client, "round", round, 40, 1000) for client in range(7))
    sys.stdout.write(f"{head}\\n"); sys.stdout.flush()
"""


def entries(count: int, run: str = "a") -> list[Entry]:
    return [Entry(run, "Fit", 0, "round", n + 1, 10 + n, 100) for n in range(count)]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Ten entries in five exchanges."""
    ledger = Ledger(tmp_path)
    for number in range(5):
        ledger.append(entries(10)[2 * number : 2 * number + 2])
    return tmp_path


def lines(ledger: Path) -> list[bytes]:
    return (ledger / FILE).read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_and_by_whoever_goes_on(ledger: Path) -> None:
    head = Ledger(ledger).append([Entry("b", "SizeReport", 3, "round", 1, 25, 8, epsilon=0.5)])
    found = check(ledger)
    assert (found.problems, found.notes) == ([], [])
    assert [entry["n"] for entry in found.entries] == list(range(1, 12))
    assert found.entries[4]["samples"] == 14
    assert {key: found.entries[-1][key] for key in ("run", "kind", "client", "epsilon")} == {
        "run": "b", "kind": "SizeReport", "client": 3, "epsilon": 0.5,
    }  # fmt: skip
    assert (ledger / HEAD).read_text().strip() == str(head)
    assert Head.parsed(str(head)) == head == Head(11, head.digest)
    assert (ledger / FILE).stat().st_mode & 0o077 == 0


def test_an_entry_is_on_the_disk_before_its_head_and_before_its_answer_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, sync, synced = Ledger(tmp_path), os.fsync, list[tuple[int, int, bool]]()

    def watched(descriptor: int) -> None:
        sync(descriptor)
        file = os.fstat(descriptor)
        synced.append((file.st_ino, file.st_size, (tmp_path / HEAD).exists()))

    monkeypatch.setattr(os, "fsync", watched)
    ledger.append(entries(2))
    file = (tmp_path / FILE).stat()
    assert synced == [(file.st_ino, file.st_size, False)]
    assert (tmp_path / HEAD).exists()


def test_two_processes_take_turns(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    for _ in range(3):
        one.append(entries(2, "a"))
        other.append(entries(1, "b"))
    found = check(tmp_path)
    assert found.problems == []
    assert "".join(entry["run"] for entry in found.entries) == "aabaabaab"


def changed(ledger: Path) -> str:
    text = (ledger / FILE).read_bytes()
    (ledger / FILE).write_bytes(text.replace(b'"samples": 14', b'"samples": 41'))
    return "line 5 of 10 was changed"


def changed_with_its_checksum(ledger: Path) -> str:
    kept, head = lines(ledger), (ledger / HEAD).read_text()
    (ledger / FILE).write_bytes(b"".join(kept[:4]))
    Ledger(ledger).append(entries(1))
    kept[4] = lines(ledger)[4]
    (ledger / FILE).write_bytes(b"".join(kept))
    (ledger / HEAD).write_text(head)
    return "line 6 of 10 was changed"


def cut_out(ledger: Path) -> str:
    kept = lines(ledger)
    del kept[3]
    (ledger / FILE).write_bytes(b"".join(kept))
    return "line 4 of 9 was changed"


def moved(ledger: Path) -> str:
    kept = lines(ledger)
    kept[6], kept[7] = kept[7], kept[6]
    (ledger / FILE).write_bytes(b"".join(kept))
    return "line 7 of 10"


def tail_cut_off(ledger: Path) -> str:
    (ledger / FILE).write_bytes(b"".join(lines(ledger)[:7]))
    return "entries 8 to 10 are missing: ledger.head has 10 entries, but the ledger has 7"


def all_gone(ledger: Path) -> str:
    (ledger / FILE).unlink()
    return "entries 1 to 10 are missing: ledger.head has 10 entries, but the ledger has 0"


def head_gone(ledger: Path) -> str:
    (ledger / HEAD).unlink()
    return "ledger.head is missing"


def head_spoilt(ledger: Path) -> str:
    (ledger / HEAD).write_text("ten")
    return "ledger.head is damaged"


def written_anew(ledger: Path) -> str:
    (ledger / FILE).unlink()
    head = (ledger / HEAD).read_text()
    Ledger(ledger).append(entries(12, "b"))
    (ledger / HEAD).write_text(head)
    return "entry 10 was rewritten, and differs from ledger.head"


def binary(ledger: Path) -> str:
    kept = lines(ledger)
    kept[2] = b"\0" * 50 + b"\n"
    (ledger / FILE).write_bytes(b"".join(kept))
    return "line 3 of 10"


@pytest.mark.parametrize(
    "attack",
    [
        changed,
        changed_with_its_checksum,
        cut_out,
        moved,
        tail_cut_off,
        all_gone,
        head_gone,
        head_spoilt,
        written_anew,
        binary,
    ],
)
def test_whatever_is_done_to_it_shows(ledger: Path, attack, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ledger).problems == []
    problem = attack(ledger)
    found = check(ledger)
    assert any(problem in each for each in found.problems), found.problems
    (ledger / PLACE).mkdir()
    for file in [each for each in ledger.iterdir() if each.is_file()]:
        file.rename(ledger / PLACE / file.name)
    assert main(["ledger", str(ledger), "--verify"]) == 1
    assert problem in capsys.readouterr().err


def test_who_cuts_the_head_as_well_is_found_by_what_the_server_was_told(ledger: Path, tmp_path: Path) -> None:
    head = Ledger(ledger).append(entries(1))
    (tmp_path / HEADS).write_text(
        "".join(
            json.dumps({"site": site, "head": str(of)}) + "\n" for site, of in [("a", head), ("b", Head(99, "0" * 64))]
        )
    )
    reported = heads_of(tmp_path, "a")
    assert reported == [head]
    assert check(ledger, reported).problems == []
    kept = lines(ledger)[:6]
    (ledger / FILE).write_bytes(b"".join(kept))
    digest = json.loads(kept[-1])["checksum"]
    (ledger / HEAD).write_text(f"6:{digest}\n")
    assert check(ledger).problems == []
    assert check(ledger, reported).problems == [
        "entries 7 to 11 are missing: the server's record has 11 entries, but the ledger has 6"
    ]
    # So is one that was written anew in the same length.
    (ledger / FILE).unlink()
    (ledger / HEAD).unlink()
    Ledger(ledger).append(entries(11, "b"))
    assert check(ledger, reported).problems == ["entry 11 was rewritten, and differs from the server's record"]
    with pytest.raises(DataError, match=r"does not contain a record of the site c\. Check --site\."):
        heads_of(tmp_path, "c")


@pytest.mark.parametrize("left", [1, 30, -1])
def test_a_line_that_a_crash_tore_is_cut_off_and_said(ledger: Path, left: int) -> None:
    whole = lines(ledger)
    (ledger / FILE).write_bytes(b"".join(whole[:-1]) + whole[-1][:left])
    (ledger / HEAD).write_text(f"9:{json.loads(whole[8])['checksum']}\n")
    found = check(ledger)
    assert found.problems == []
    assert "the line after entry 9 is incomplete" in found.notes[0]
    Ledger(ledger).append(entries(1))
    again = check(ledger)
    assert again.problems == []
    assert [entry["kind"] for entry in again.entries[-2:]] == ["recovered", "Fit"]
    assert again.notes == [
        "entry 10: the line after entry 9 was incomplete, because the site crashed before it sent the reply"
    ]


def test_a_crash_before_the_head_was_written_is_no_tampering(ledger: Path) -> None:
    digest = json.loads(lines(ledger)[7])["checksum"]
    (ledger / HEAD).write_text(f"8:{digest}\n")
    found = check(ledger)
    assert found.problems == []
    assert found.notes == ["ledger.head has 8 entries, but the ledger has 10, because of a crash"]


def killed(folder: Path, rounds: int, seed: int) -> None:
    """Kill a writer again and again: whatever it said had left is there."""
    generator, left = random.Random(seed), []
    for _ in range(rounds):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        left.append(Head.parsed(writer.stdout.readline().strip()))
        time.sleep(generator.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait()
        writer.stdout.close()
        left += [Head.parsed(line) for line in rest.splitlines() if Head.parsed(line)]
    found = check(folder, [head for head in left if head])
    assert found.problems == []
    assert len(found.entries) >= max(head.entries for head in left if head)


@pytest.mark.slow
def test_killed_at_any_moment_it_is_whole(tmp_path: Path) -> None:
    killed(tmp_path, rounds=2, seed=0)


@pytest.mark.long
def test_killed_a_hundred_times_it_is_whole(tmp_path: Path) -> None:
    killed(tmp_path, rounds=100, seed=1)


def test_where_nothing_can_be_written_nothing_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"."):
        Ledger(tmp_path / "file").append(entries(1))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_entries_that_could_not_be_written_as_a_whole_are_written_once(tmp_path: Path) -> None:
    """A disk that is full in the middle of the entries, and one without room for the head."""
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.append(entries(2))
    size = (tmp_path / FILE).stat().st_size
    with files_of_at_most(size + size // 2 + 20), pytest.raises(OSError, match="too large"):
        one.append(entries(5, "b"))
    head = (tmp_path / HEAD).read_text()
    (tmp_path / HEAD).unlink()
    (tmp_path / HEAD).mkdir()
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            one.append(entries(5, "b"))
    (tmp_path / HEAD).rmdir()
    (tmp_path / HEAD).write_text(head)
    assert check(tmp_path).problems == check(tmp_path).notes == []
    one.append(entries(5, "b"))
    other.append(entries(1, "c"))
    found = check(tmp_path)
    assert (found.problems, found.notes) == ([], [])
    assert "".join(entry["run"] for entry in found.entries) == "aabbbbbc"


def test_an_answer_that_stayed_is_no_answer(tmp_path: Path) -> None:
    site = asked.Site(tmp_path / "states", policy=Policy(jobs="within-policy", min_samples=1))
    site.site_server.ledger = Ledger(tmp_path)
    assert isinstance(site.begin(), Begun)
    (tmp_path / HEAD).mkdir()
    for number in range(3):
        assert "IsADirectoryError" in site.ask(Fit(1, site.weights, {}, 1.0))[0].reason, number
    assert "the ledger cannot be written" in site.site_server.problem
    (tmp_path / HEAD).rmdir()
    assert site.save(1) == Done()
    found = check(tmp_path)
    assert (found.problems, found.notes) == ([], [])
    assert [entry.get("failed", entry.get("refused")) for entry in found.entries] == [
        "IsADirectoryError", "repeat", "repeat",
    ]  # fmt: skip


def test_a_file_that_is_no_ledger_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("a page of something else\n")
    with pytest.raises(
        DataError, match=r"the last line is not an entry\. Run 'fedstrata ledger --verify' for details\."
    ):
        Ledger(tmp_path).append(entries(1))


@pytest.mark.slow
def test_totals_add_up_epsilon_over_rounds_and_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / PLACE)
    for run, rounds in (("first", 3), ("other", 2)):
        ledger.append(Entry(run, "SizeReport", 0, "round", n + 1, 30, 8, epsilon=0.5) for n in range(rounds))
    ledger.append([Entry("first", "Fit", 0, "round", 1, 25, 4000), Entry("first", "Fit", 0, "round", 2, 12, 4000)])
    ledger.append([Entry("first", "LabelReport", 0, refused="kind"), Entry("first", "Fit", 0, failed="ValueError")])
    rows = {(row["run"], row["question"]): row for row in totals(check(tmp_path / PLACE).entries)}
    assert rows["first", "SizeReport"]["epsilon"] == 1.5
    assert rows["other", "SizeReport"]["epsilon"] == 1.0
    fits = rows["first", "Fit"]
    assert (fits["answers"], fits["fewest_samples"], fits["bytes"], fits["refused"]) == (2, 12, 8000, 0)
    assert (rows["first", "LabelReport"]["answers"], rows["first", "LabelReport"]["refused"]) == (0, 1)
    assert main(["ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "first  SizeReport: 3 replies, each from at least 30 samples, 24 bytes, ε = 1.5 in all" in out
    assert main(["ledger", str(tmp_path), "--csv"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 10
    assert table[1].split(",")[2:6] == ["first", "0", "SizeReport", "round"]
    assert main(["ledger", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out == "intact: 9 entries\n"
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["whole"], told["entries"]) == (True, 9)
    assert {row["run"] for row in told["questions"]} == {"first", "other"}


@pytest.mark.slow
def test_the_head_goes_with_the_answers_and_into_the_servers_run_folder(tmp_path: Path) -> None:
    """Two real sites and a real server's engine, in one process: all that crosses are bytes."""
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 3},
            "data": {"name": "digits", "limit": 90},
            "model": {"name": "mlp", "hidden": []},
            "method": {"name": "fedstas", "epsilon": 2.0, "bound": 40, "strata": 2, "fraction": 1.0},
            "training": {"rounds": 2, "local_steps": 1, "clients_per_round": 3},
        }
    )
    ledgers = {name: Ledger(tmp_path / name / PLACE) for name in "ab"}
    site_servers = {
        name: SiteServer(
            name,
            tmp_path / name,
            lambda target, data: b"",
            SiteSettings(),
            policy=Policy(jobs="within-policy", min_samples=1),
            ledger=ledger,
        )
        for name, ledger in ledgers.items()
    }

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            return site_servers[site].call(SERVER, data)

    folder, prepared = tmp_path / "run", prepare(spec)
    engine = make_site_engine(
        prepared.config, Transport(), list("aab"), Sums(60.0), spec=spec.to_toml(), run="run", log_heads=folder / HEADS
    )
    history = run_prepared(prepared, folder, engine, [engine.write_log_heads])
    assert history[-1]["clients_trained"] == 3
    for name, clients in (("a", 2), ("b", 1)):
        found = check(tmp_path / name / PLACE, heads_of(folder, name))
        assert found.problems == []
        assert len(heads_of(folder, name)) == 2  # after each round
        rows = {row["question"]: row for row in totals(found.entries)}
        assert rows["Fit"]["answers"] == 2 * clients
        assert rows["SizeReport"]["epsilon"] == pytest.approx(2.0 * 2 * clients)
        assert {entry["phase"] for entry in found.entries} == {"round"}
        # Neither a value nor a label is anywhere: the words of the ledger are its own.
        assert all(set(entry) <= {"n", "at", *Entry.__dataclass_fields__} for entry in found.entries)
    # What was cut off afterwards, head and all, the server's folder knows of.
    ledger = tmp_path / "a" / PLACE
    kept = lines(ledger)[:-1]
    (ledger / FILE).write_bytes(b"".join(kept))
    (ledger / HEAD).write_text(f"{len(kept)}:{json.loads(kept[-1])['checksum']}")
    assert check(ledger).problems == []
    assert "missing: the server's record has" in check(ledger, heads_of(folder, "a")).problems[0]


def test_no_kit_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(tmp_path)]) == 2
    assert "the ledger does not exist yet" in capsys.readouterr().err
