"""Pickles of plain values, read without Python's unpickler: nothing in the file can run, import or outgrow it.

``pickle`` calls what a file names, and even with every name refused a small file can ask it for a table of gigabytes or
for the hash of a tuple that takes years. So the few opcodes that plain dicts, lists, tuples, text and numbers
are written with are played here, and every other one is refused by its name. Memory and time grow with the file's
length alone: text is only copied out of it, a number has eight bytes, keys are text.

Source: Lib/pickletools.py of CPython, which documents each opcode; ``pickle.dump`` writes protocols 2 to 5 with these.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct, error
from typing import Any

from memcalc.errors import FileError
from memcalc.files import read_bytes

__all__ = ["LARGEST_FILE", "is_pickle", "load_plain", "read_plain"]

LARGEST_FILE = 512 * 2**20
# A dict takes 360 bytes at most for the eight keys of a snapshot's entries: 1.5 GB of RAM for so many.
_MOST_CONTAINERS = 4_000_000
_MOST_REMEMBERED = 2 * _MOST_CONTAINERS  # containers and texts
_DEEPEST = 100  # a snapshot is seven deep
_MOST_WAITING = 100_000  # pickle.dump puts a thousand items into their container at a time
_PROTOCOL = 0x80

_INT16, _INT32, _UINT32, _UINT64, _FLOAT = Struct("<H"), Struct("<i"), Struct("<I"), Struct("<Q"), Struct(">d")


class _Refused(Exception):
    """What is wrong with the file, to be said with its name."""


def is_pickle(data: bytes) -> bool:
    """Whether it starts as a binary pickle does: with the opcode of the protocol, which no text starts with."""
    return data[:1] == bytes([_PROTOCOL])


def load_plain(path: Path) -> Any:
    """The plain value in a pickle file. Raises FileError in one line, whatever the file holds."""
    return read_plain(read_bytes(path, LARGEST_FILE), str(path))


def read_plain(data: bytes, name: str) -> Any:
    """The same of bytes; ``name`` is what errors call them.

    >>> import pickle
    >>> read_plain(pickle.dumps({"a": [1, 2.5, None, ("b", True)]}), "test")
    {'a': [1, 2.5, None, ('b', True)]}
    """
    if not is_pickle(data):
        raise FileError(f"{name} is not a pickle of torch.cuda.memory._dump_snapshot")
    try:
        return _play(data)
    except _Refused as refused:
        raise FileError(f"{name}: {refused}") from None
    except UnicodeDecodeError:
        raise FileError(f"{name} is damaged: a text in it is not UTF-8") from None
    except (IndexError, KeyError, error):
        raise FileError(f"{name} is damaged, or was cut off while it was written") from None


def _play(data: bytes) -> Any:
    """Play the opcodes. Raises _Refused, and IndexError, KeyError or struct.error where the bytes end or point nowhere."""
    size, at, containers = len(data), 0, 0
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}
    while True:
        code = data[at]
        at += 1
        # The order is that of their frequency in a snapshot.
        if code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[_UINT32.unpack_from(data, at)[0]])
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x4D:  # BININT2
            stack.append(_INT16.unpack_from(data, at)[0])
            at += 2
        elif code == 0x4A:  # BININT
            stack.append(_INT32.unpack_from(data, at)[0])
            at += 4
        elif code == 0x8A:  # LONG1
            length, at = data[at], at + 1
            if length > 9:  # an unsigned number of 64 bits has a ninth byte for its sign
                raise _Refused("it holds a number of more than 64 bits, which no snapshot has")
            if at + length > size:
                raise IndexError
            stack.append(int.from_bytes(data[at : at + length], "little", signed=True))
            at += length
        elif code == 0x8C or code == 0x58:  # SHORT_BINUNICODE, BINUNICODE
            if code == 0x8C:
                length, at = data[at], at + 1
            else:
                length, at = _UINT32.unpack_from(data, at)[0], at + 4
            if at + length > size:
                raise IndexError
            stack.append(data[at : at + length].decode("utf-8", "surrogatepass"))
            at += length
        elif code == 0x28:  # MARK
            if len(below) == _DEEPEST:
                raise _Refused(f"it is nested more than {_DEEPEST} deep, which no snapshot is")
            below.append(stack)
            stack = []
        elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
            if code == 0x75:
                items, stack = stack, below.pop()
            else:
                items = stack[-2:]
                del stack[-2:]
            _fill(stack[-1], items)
        elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
            if code == 0x65:
                items, stack = stack, below.pop()
            else:
                items = [stack.pop()]
            if type(stack[-1]) is not list:
                raise _Refused("it is damaged: it appends to something that is no list")
            stack[-1].extend(items)
        elif code in (0x7D, 0x5D, 0x29):  # EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE
            containers += 1
            stack.append({} if code == 0x7D else [] if code == 0x5D else ())
        elif code == 0x74:  # TUPLE
            items, stack = stack, below.pop()
            containers += 1
            stack.append(tuple(items))
        elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            length = code - 0x84
            if len(stack) < length:
                raise IndexError
            containers += 1
            stack[-length:] = [tuple(stack[-length:])]
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x88 or code == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(code == 0x88)
        elif code == 0x47:  # BINFLOAT
            stack.append(_FLOAT.unpack_from(data, at)[0])
            at += 8
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[_UINT32.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif code == 0x95:  # FRAME: how many bytes follow before the next one, for readers that read ahead
            _UINT64.unpack_from(data, at)
            at += 8
        elif code == _PROTOCOL:
            if not 2 <= data[at] <= 5:
                raise _Refused(f"it is a pickle of protocol {data[at]}; known: 2 to 5")
            at += 1
        elif code == 0x2E:  # STOP
            if below or len(stack) != 1:
                raise IndexError
            return stack[0]
        else:
            raise _Refused(_foreign(code))
        if containers > _MOST_CONTAINERS or len(memo) > _MOST_REMEMBERED:
            raise _Refused(f"it holds more than {_MOST_CONTAINERS:,} dicts and lists; record with fewer max_entries")
        if len(stack) > _MOST_WAITING:
            raise _Refused("it is no snapshot: too many of its values stand in no container")


def _fill(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise _Refused("it is damaged: it sets keys of something that is no dict")
    keys = items[::2]
    if not all(type(key) is str for key in keys):
        raise _Refused("it has a key that is not text; a snapshot has none")
    target.update(zip(keys, items[1::2], strict=True))


def _foreign(code: int) -> str:
    from pickletools import opcodes  # only a refusal needs it

    known = next((each for each in opcodes if each.code == chr(code)), None)
    if known is None:
        return f"it is damaged: byte {code} is no opcode of a pickle"
    return f"it holds more than plain containers (opcode {known.name}), so it is not read: a pickle can run programs"
