"""Pickles that hold nothing but data: dictionaries with names for keys, lists, tuples, text, bytes and numbers.

A pickle is a program, and Python's own reader runs it. This one knows only the opcodes that make such data. What would
import a name, call something or hash a structure has no opcode here, so nothing in the file can be executed. One byte
of a file can ask for a dictionary, so what is made is added up: it takes no more than `room_for` the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from sys import getsizeof
from typing import Any, Final

from dsprof.run import RunError

from .room import room_for

DENIED: Final = {
    b"c": "imports a name", b"\x93": "imports a name", b"i": "imports a name and calls it",
    b"R": "calls a function", b"o": "makes an object", b"\x81": "makes an object", b"\x92": "makes an object",
    b"b": "sets the state of an object",
    b"P": "asks for an object outside of it", b"Q": "asks for an object outside of it",
    b"\x82": "asks for a registered name", b"\x83": "asks for a registered name", b"\x84": "asks for a registered name",
}  # fmt: skip
"""Opcodes that a data file has no use for: what they do."""
LONGEST_NAME: Final = 80
LONGEST_NUMBER: Final = 16
"""Bytes of a whole number."""
LOOK_EVERY: Final = 1 << 16
"""Bytes of the file between two looks at how much has been made of it."""
KEY: Final = 32
"""Bytes of a number that the memo has as a key."""

_U4, _I4, _U8, _F8, _U2 = (struct.Struct(code) for code in ("<I", "<i", "<Q", ">d", "<H"))
_MARK: Final = object()


SNAPSHOT: Final = ("a memory snapshot", "torch.cuda.memory._dump_snapshot")


def load(data: bytes, name: str, kind: tuple[str, str] = SNAPSHOT) -> Any:
    """What the pickle `data` (protocol 2 or later) holds; `name`, and what it should be and what writes such a one, are
    for messages. Raises RunError."""
    try:
        return _Reader(data, name, kind).value()
    except (IndexError, KeyError, TypeError, ValueError, MemoryError, OverflowError, struct.error) as error:
        raise RunError(
            f"{name}: damaged or cut short ({type(error).__name__} in its {len(data):,} bytes); copy or dump it again"
        ) from error


class _Reader:
    """A stack, a memo, and a place in `data`."""

    def __init__(self, data: bytes, name: str, kind: tuple[str, str]) -> None:
        self._data, self._name, self._kind = data, name, kind
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._room = room_for(len(data))
        self._made = 0
        """Bytes of what was made, without stack and memo."""

    def value(self) -> Any:
        data, stack, memo = self._data, self._stack, self._memo
        at = look_at = 0
        while True:
            code = data[at]
            at += 1
            # By how often they come in a snapshot.
            if code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[_U4.unpack_from(data, at)[0]])
                at += 4
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x28:
                stack.append(_MARK)
            elif code == 0x75:  # SETITEMS
                self._set(self._marked())
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                self._make(str(data[at + 1 : end], "utf-8", "replace"))
                at = end
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x2E:  # STOP
                return self._only()
            else:
                self._at = at
                act = _OTHERS.get(code)
                if act is None:
                    self._refuse(bytes([code]))
                else:
                    act(self)
                at = self._at
            if at > look_at:
                look_at = self._look(at)

    def _look(self, at: int) -> int:
        """Raises where more was made than there is room for, or read than there is. The next place to look."""
        if at > len(self._data):
            raise IndexError
        memo = self._memo
        if self._made + getsizeof(self._stack) + getsizeof(memo) + KEY * len(memo) > self._room:
            raise RunError(
                f"{self._name}: its {len(self._data):,} bytes would take more than {self._room >> 20:,} MiB of memory, "
                f"which {self._kind[0]} never does; dump it again with {self._kind[1]}"
            )
        return min(at + LOOK_EVERY, len(self._data))

    # --- the rarer opcodes ------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if count < 0 or self._at > len(self._data):
            raise IndexError
        return self._data[begin : self._at]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _make(self, value: Any) -> None:
        """Push what takes room of its own."""
        self._made += getsizeof(value)
        self._stack.append(value)

    def _long(self, count: int) -> None:
        if count > LONGEST_NUMBER:
            raise ValueError
        self._make(int.from_bytes(self._take(count), "little", signed=True))

    def _text(self, form: struct.Struct) -> None:
        self._make(str(self._take(self._number(form)), "utf-8", "replace"))

    def _put(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _marked(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                items = stack[place + 1 :]
                del stack[place:]
                return items
        raise IndexError

    def _set(self, items: list[Any]) -> None:
        into = self._stack[-1]
        if type(into) is not dict or len(items) % 2:
            raise ValueError
        for key in items[::2]:
            if type(key) is not str and type(key) is not int:
                raise ValueError
        before = getsizeof(into)
        into.update(zip(items[::2], items[1::2], strict=True))
        self._made += getsizeof(into) - before

    def _extend(self, items: list[Any]) -> None:
        into = self._stack[-1]
        if type(into) is not list:
            raise ValueError
        before = getsizeof(into)
        into += items
        self._made += getsizeof(into) - before

    def _tuple(self, count: int) -> None:
        items = self._stack[len(self._stack) - count :]
        if len(items) < count or _MARK in items:
            raise ValueError
        del self._stack[len(self._stack) - count :]
        self._make(tuple(items))

    def _only(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise ValueError
        return self._stack[0]

    def _global(self) -> str:
        """Of an opcode that imports: the name it asks for."""
        if self._data[self._at - 1] == 0x93:
            words = [str(item) for item in self._stack[-2:] if isinstance(item, str)]
        else:
            words = str(self._data[self._at : self._at + 2 * LONGEST_NAME], "utf-8", "replace").split("\n")[:2]
        return ".".join("".join(c if c.isprintable() else "?" for c in word[:LONGEST_NAME]) for word in words)

    def _refuse(self, code: bytes) -> None:
        what = DENIED.get(code)
        if what is None:
            raise ValueError
        if code in b"ci\x93":
            what += f", {self._global()!r}"
        raise RunError(
            f"{self._name}: {what} at byte {self._at - 1:,}, which {self._kind[0]} never does; nothing of it was "
            f"executed. Dump it again with {self._kind[1]}, and do not open this file with pickle"
        )


def _constant(value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader._push(value)


_OTHERS: Final[dict[int, Callable[[_Reader], None]]] = {
    0x80: lambda r: _checked_protocol(r._take(1)[0]),
    0x95: lambda r: (r._take(8), None)[1],  # FRAME: how much is to be read ahead
    0x7D: lambda r: r._make({}),
    0x5D: lambda r: r._make([]),
    0x29: lambda r: r._push(()),
    0x4E: _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    0x4A: lambda r: r._make(r._number(_I4)),
    0x4D: lambda r: r._make(r._number(_U2)),
    0x47: lambda r: r._make(r._number(_F8)),
    0x8A: lambda r: r._long(r._take(1)[0]),
    0x8B: lambda r: r._long(r._number(_U4)),
    0x58: lambda r: r._text(_U4),
    0x8D: lambda r: r._text(_U8),
    0x43: lambda r: r._make(r._take(r._take(1)[0])),
    0x42: lambda r: r._make(r._take(r._number(_U4))),
    0x71: lambda r: r._put(r._take(1)[0]),
    0x72: lambda r: r._put(r._number(_U4)),
    0x73: lambda r: r._set([r._stack.pop(-2), r._stack.pop()]),
    0x61: lambda r: r._extend([r._stack.pop()]),
    0x65: lambda r: r._extend(r._marked()),
    0x74: lambda r: r._make(tuple(r._marked())),
    0x85: lambda r: r._tuple(1),
    0x86: lambda r: r._tuple(2),
    0x87: lambda r: r._tuple(3),
}


def _checked_protocol(number: int) -> None:
    if not 2 <= number <= 5:
        raise ValueError
