"""Files that others read are whole or as before, whenever and however their writing ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from engine.whole_file import is_part, write_new, write_whole


class Killed(BaseException):
    pass


def killed_at(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(os, call, kill)


def test_it_holds_what_was_written_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "one")
    assert path.read_text() == "one"
    path.chmod(0o640)
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    write_whole(path, "three", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_gets_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("call", ["fsync", "fdopen"])
def test_a_writer_that_ends_leaves_what_was_there(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "one")
    killed_at(call, monkeypatch)
    with pytest.raises(Killed):
        write_whole(path, "two")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("one")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "two"


def test_what_is_no_plain_file_is_written_to() -> None:
    write_whole(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()


def test_a_pipe_is_written_to_whatever_it_is_called() -> None:
    """As ``/dev/stdout`` is: a link, and what it leads to has no name in any folder."""
    reader, writer = os.pipe()
    try:
        write_whole(Path(f"/dev/fd/{writer}"), "x")
        assert os.read(reader, 2) == b"x"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced_is_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mounted by itself, or in a folder that takes no new ones."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.yaml"
    path.write_text("one, which is longer")
    monkeypatch.setattr(Path, "replace", refuse)
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(path, "three", mode=0o644)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(tmp_path / "new", "x")
    assert list(tmp_path.iterdir()) == [path]


def test_errors_are_about_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for write in (write_whole, write_new):
        with pytest.raises(FileNotFoundError) as caught:
            write(tmp_path / "none" / "a", "x")
        assert caught.value.filename == str(tmp_path / "none" / "a")


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_new(path, "one", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_new(path, "two")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", "two")
    assert path.read_text() == "one"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "token"]


def test_a_file_system_without_links_takes_a_new_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", refuse)
    write_new(tmp_path / "token", "one")
    assert (tmp_path / "token").read_text() == "one"
    with pytest.raises(PermissionError):
        write_new(tmp_path / "token", "two")


def test_what_a_killed_writer_left_is_known(tmp_path: Path) -> None:
    seen: list[Path] = []
    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        seen.append(self)
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "replace", note)
        write_whole(tmp_path / ("x" * 200), "x")
    assert is_part(seen[0])
    assert not is_part(tmp_path / "recipe.json")
