"""Pickles of plain values are read as pickle reads them; everything else ends in one line, soon and in little memory."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.errors import FileError
from memcalc.plain_pickle import load_plain, read_plain

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=30,
)


@given(plain, st.integers(2, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps([value, value], protocol)  # what stands twice is written once and pointed at
    assert read_plain(data, "test") == pickle.loads(data)


def test_long_lists_texts_and_many_shared_values() -> None:
    shared = [{"name": "x" * (index % 400)} for index in range(3000)]
    value = {"a": shared, "b": shared[::-1], "c": list(range(70000))}
    assert read_plain(pickle.dumps(value), "test") == value


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/memcalc-was-here",)


def bomb_of_tuples(depth: int = 60) -> bytes:
    """A key that holds itself twice, sixty times over: its hash would take 2**60 steps."""
    return b"\x80\x04}" + b")" + b"2\x86" * depth + b"Ks."


HOSTILE = {
    "runs a program": (pickle.dumps(Evil()), "STACK_GLOBAL"),
    "runs a program, protocol 2": (pickle.dumps(Evil(), 2), "GLOBAL"),
    "names a class": (pickle.dumps(Path), "STACK_GLOBAL"),
    "persistent id": (b"\x80\x04K\x01Q.", "BINPERSID"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "text opcodes": (b"\x80\x02L" + b"9" * 100000 + b"L\n.", "LONG"),
    "a memo of gigabytes": (b"\x80\x02Kr\xff\xff\xff\x7f.", "damaged"),
    "a bytearray of exabytes": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "BYTEARRAY8"),
    "bytes": (pickle.dumps(b"abc"), "BYTES"),
    "a set": (pickle.dumps({1}), "EMPTY_SET"),
    "a doubling key": (bomb_of_tuples(), "DUP"),
    "a key of a tuple": (pickle.dumps({(1, 2): 3}), "key that is not text"),
    "a number of 65 bits and more": (pickle.dumps(2**80), "64 bits"),
    "nested marks": (b"\x80\x04" + b"(" * 100000 + b".", "nested"),
    "nothing but nones": (b"\x80\x04" + b"N" * 1000000, "no container"),
    "protocol 9": (b"\x80\x09N.", "protocol 9"),
    "empty": (b"", "not a pickle"),
    "json": (b"{}", "not a pickle"),
    "protocol alone": (b"\x80", "cut off"),
    "sets keys of a list": (b"\x80\x04]\x8c\x01aK\x01s.", "no dict"),
    "appends to a dict": (b"\x80\x04}K\x01a.", "no list"),
    "text that is not UTF-8": (b"\x80\x04\x8c\x01\xff.", "UTF-8"),
    "text that is cut off": (b"\x80\x04X\xff\xff\xff\x7fabc", "cut off"),
    "two values": (b"\x80\x04NN.", "damaged"),
    "a zip archive": (b"PK\x03\x04" * 100, "not a pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, said = HOSTILE[name]
    path = tmp_path / "file.pickle"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(FileError) as caught:
        load_plain(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert time.process_time() - started < 2
    assert not Path("/tmp/memcalc-was-here").exists()


def test_what_contains_itself_is_read_and_harms_nobody() -> None:
    circle: list[Any] = []
    circle.append(circle)
    found = read_plain(pickle.dumps(circle), "test")
    assert found[0] is found


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_value_or_one_line(data: st.DataObject) -> None:
    codes = st.sampled_from([ord(op.code) for op in pickletools.opcodes])
    junk = data.draw(st.lists(codes | st.integers(0, 255), max_size=60))
    try:
        read_plain(b"\x80\x04" + bytes(junk) + b".", "test")
    except FileError as error:
        assert "\n" not in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_stays_in_proportion_to_the_file(tmp_path: Path) -> None:
    """A megabyte and a half of the opcodes that make the most of a byte, in a process of 400 MiB."""
    path = tmp_path / "file.pickle"
    path.write_bytes(b"\x80\x04]" + b"}\x94a" * 500_000 + b".")
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({400 * 2**20}, {400 * 2**20}))
from pathlib import Path
from memcalc.plain_pickle import load_plain
print(len(load_plain(Path({str(path)!r}))))
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.stdout == "500000\n", done.stderr
