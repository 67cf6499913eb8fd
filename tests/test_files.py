"""Reading what a user points at, and writing whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc import files
from memcalc.errors import FileError
from memcalc.files import read_json, read_text, write_text

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def message(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_text(path)
    return str(caught.value).replace(str(path), "PATH")


def test_text_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a file.txt"
    write_text(path, "first\nzweite ä\n")
    assert read_text(path) == "first\nzweite ä\n"
    write_text(path, "new")
    assert read_text(path) == "new"
    assert os.listdir(tmp_path) == ["a file.txt"]


def test_a_missing_file_a_folder_and_a_pipe(tmp_path: Path) -> None:
    assert message(tmp_path / "none.json") == "PATH does not exist"
    assert message(tmp_path) == "PATH is a folder"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert message(tmp_path / "pipe") == "PATH is not a regular file"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert message(path).startswith("PATH cannot be read: ")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.touch(mode=0)
    assert message(path) == "PATH cannot be read: permission denied"


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    assert message(path) == "PATH is larger than 64 MiB, too large for a file of this kind"


@given(JSON)
def test_json_reads_back(data: object) -> None:
    assert read_json(json.dumps(data), "x") == data


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "x is empty; expected JSON"),
        (" \n", "x is empty; expected JSON"),
        ("{", "x is not valid JSON: "),
        ("{'a': 1}", "x is not valid JSON: "),
        ("[1, 2,]", "x is not valid JSON: "),
        ("NaN", "NaN is not a number JSON knows"),
        ('{"a": -Infinity}', "-Infinity is not a number JSON knows"),
        ("[1e400]", "'1e400' is too large for a number"),
        ("9" * 5000, "x is not valid JSON: "),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ("[" * 100_000, "x is not valid JSON: "),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_not_json_is_said_on_one_line(text: str, part: str) -> None:
    with pytest.raises(FileError) as caught:
        read_json(text, "x")
    assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 200


@given(st.text() | JSON.map(json.dumps).flatmap(lambda text: st.integers(0, len(text)).map(lambda n: text[:n])))
def test_any_text_is_json_or_a_file_error(text: str) -> None:
    line = ""
    try:
        read_json(text, "x")
    except FileError as error:
        line = str(error)
    assert len(line.splitlines()) <= 1


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(FileError, match=r"plan.json cannot be written: no space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_text_that_has_no_utf8_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write_text(tmp_path / "x", "\ud800")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["missing/x.json", "x\0y", "a" * 300])
def test_names_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write_text(tmp_path / name, "x")
    assert os.listdir(tmp_path) == []


def test_a_device_or_a_folder_is_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a folder; give the name of a file"):
        write_text(tmp_path, "x")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FileError, match="is not a regular file"):
            write_text(tmp_path / "pipe", "x")
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644
