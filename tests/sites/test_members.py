"""The server's list while it runs and somebody edits it by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.sites.members import MEMBERS, Members, revoke, write_members


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    (tmp_path / MEMBERS).parent.mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "slip", ['{"sites": ["a",]}', "", "[]", '{"sites": "ab"}', '{"site": []}', '{"sites": [], "federation": 1}', "\0"]
)
def test_a_list_with_a_slip_leaves_the_last_that_could_be_read(
    kit: Path, slip: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    list_ = Members(kit)
    assert not list_.struck("a"), "there is no list"
    write_members(kit, ["a", "b"])
    assert [list_.struck(name) for name in "abc"] == [False, False, True]
    (kit / MEMBERS).write_text(slip)
    for _ in range(3):
        assert [list_.struck(name) for name in "abc"] == [False, False, True]
    assert caplog.text.count("cannot be read as the list of sites that may connect") == 1
    assert "may connect: a, b" in caplog.text
    assert main(["revoke", str(kit), "a"]) == 2
    assert "cannot be read as the list of sites that may connect" in capsys.readouterr().err
    write_members(kit, ["a"])
    assert [list_.struck(name) for name in "abc"] == [False, True, True]


def test_only_who_was_on_the_list_is_put_on_it_again(kit: Path) -> None:
    """A name with a slip was added, and the site that was meant stayed away."""
    write_members(kit, ["a", "b"])
    assert revoke(kit, "b") == ["a"]
    with pytest.raises(
        SpecError, match=r"'bb': is not a site of this federation; did you mean 'b'\? Use one of: a, b\."
    ):
        revoke(kit, "bb", undo=True)
    assert revoke(kit, "b", undo=True) == ["a", "b"]
    assert revoke(kit, "b", undo=True) == ["a", "b"]


def test_before_there_was_a_list_that_can_be_read_nobody_is_on_it(kit: Path) -> None:
    (kit / MEMBERS).write_text("{")
    assert Members(kit).struck("a")


def test_a_site_is_struck_off_the_list_that_was_read(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list was read three times: edited meanwhile, it was none that ever was."""
    write_members(kit, ["a", "b"])
    reads: list[Path] = []
    whole = Path.read_bytes

    def read_it(path: Path) -> bytes:
        reads.append(path)
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", read_it)
    assert revoke(kit, "a") == ["b"]
    assert reads == [kit / MEMBERS]
