"""What stands around the events of a trace: found, and as far as it is used kept, in one walk through the text.

The events may come late, behind gigabytes of something else, and they may be one level down: wrappers put their own
metadata first. So nothing is held but the values of the few keys that are used, and what of a string or a value has
not ended yet.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from ..room import taken_by_json
from .brackets import brackets, quotes

Int = npt.NDArray[np.int64]

EVENTS: Final = b"traceEvents"
KEPT: Final = (
    b"schemaVersion", b"deviceProperties", b"distributedInfo", b"baseTimeNanoseconds", b"host_name", b"pytorch_version",
    b"dsprof",
)  # fmt: skip
"""Keys beside the events whose values are used; `schemaVersion`, which says that it is Kineto's; and `dsprof`, by which
our own export is known again."""
KEY: Final = re.compile(rb'"(' + b"|".join((EVENTS, *KEPT)) + rb')"\s*:\s*(?=\S)')
MOST_VALUE: Final = 32 << 20
"""Bytes of the value of one of KEPT."""
MOST_TAKEN: Final = 256 << 20
"""Bytes of memory that all of them may take."""
DEEPEST: Final = 2
"""The events are in the object that is the file, or in one that is a value of it (2)."""
KEY_ROOM: Final = 256
"""Bytes in which a key and its colon are: so much is looked at again with the next block."""
VALUE_ENDS: Final = re.compile(rb"[,}\]]")


class TraceError(Exception):
    """The file is no trace, or not one that can be read; the message says what is wrong with it, and where. `advice`:
    what to do about it."""

    def __init__(self, message: str, advice: str = "record it again, or copy it again") -> None:
        super().__init__(message)
        self.advice = advice


class Around:
    """Takes text block by block. `rest` is what has not been looked at yet.

    about:  the values of KEPT, the first of each
    depth:  how many brackets are open where `rest` begins
    deeper: how many levels down events were seen that are too deep to be taken for the trace's (0: none)
    """

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.depth = self.deeper = 0
        self.begun = False
        self.rest = b""
        self._inside = False  # `rest` begins inside of a string
        self._taken = 0

    def until_events(self, block: bytes) -> bool:
        """Take a block. True where the list of events has begun: `rest` is then what follows its bracket, and `depth`
        is of the object that it is in. Raises TraceError."""
        return self._walk(block, events=True)

    def to_end(self, block: bytes) -> None:
        """Take a block of what stands behind the events. Raises TraceError."""
        self._walk(block, events=False)

    @property
    def whole(self) -> bool:
        """Whether all brackets and strings are closed at the end of what was taken."""
        quote = quotes(self.rest)
        _, deeper = brackets(self.rest, quote, inside=self._inside)
        return self.depth + int(deeper.sum()) == 0 and (len(quote) + self._inside) % 2 == 0

    def _walk(self, block: bytes, *, events: bool) -> bool:
        text = self.rest + block
        self.begun = self.begun or bool(text.strip())
        quote = quotes(text)
        mark, deeper = brackets(text, quote, inside=self._inside)
        depth = self.depth + np.cumsum(deeper)
        done = 0
        for key in KEY.finditer(text):
            # A key begins with a quote outside of strings; within one its quotes would be escaped.
            if key.start() < done or np.searchsorted(quote, key.start()) % 2 != int(self._inside):
                continue
            at = int(np.searchsorted(mark, key.start()))
            level = int(depth[at - 1]) if at else self.depth
            if key[1] == EVENTS:
                if events and text[key.end() : key.end() + 1] == b"[":
                    if 1 <= level <= DEEPEST:
                        self.rest, self.depth, self._inside = text[key.end() + 1 :], level, False
                        return True
                    self.deeper = self.deeper or level
                continue
            if not 1 <= level <= DEEPEST:
                continue
            end = _end_of_value(text, key.end(), mark[at:], deeper[at:], quote)
            if end < 0:
                if len(text) - key.start() > MOST_VALUE:
                    raise TraceError(f"its {key[1].decode()} has more than {MOST_VALUE >> 20} MiB, as no trace's does")
                self._go_on(text, key.start(), level, inside=False)
                return False
            self._keep(key[1].decode(), text[key.end() : end])
            done = end
        inside = (len(quote) + self._inside) % 2 == 1
        last = int(quote[-1]) if len(quote) else -1
        opened = last if inside else int(quote[-2]) if len(quote) > 1 else -1
        if opened >= max(len(text) - KEY_ROOM, done):  # perhaps the beginning of a key
            at = int(np.searchsorted(mark, opened))
            self._go_on(text, opened, int(depth[at - 1]) if at else self.depth, inside=False)
        else:
            cut = len(text) - (_backslashes(text) % 2 if inside else 0)
            self._go_on(text, cut, int(depth[-1]) if len(depth) else self.depth, inside=inside)
        return False

    def _go_on(self, text: bytes, at: int, depth: int, *, inside: bool) -> None:
        self.rest, self.depth, self._inside = text[at:], depth, inside

    def _keep(self, key: str, value: bytes) -> None:
        self._taken += taken_by_json(value)
        if self._taken > MOST_TAKEN:
            raise TraceError(f"its {key} would take more than {MOST_TAKEN >> 20} MiB of memory, as no trace's does")
        try:
            self.about.setdefault(key, orjson.loads(value))
        except orjson.JSONDecodeError as error:
            raise TraceError(f"its {key} is no JSON ({error})") from error


def _end_of_value(text: bytes, start: int, mark: Int, deeper: Int, quote: Int) -> int:
    """Where the value ends that begins at `start`; -1: not in this text. `mark`, `deeper`: from the key on."""
    first = text[start : start + 1]
    if first in (b"{", b"["):
        closed = np.flatnonzero(np.cumsum(deeper) == 0)
        return int(mark[closed[0]]) + 1 if len(closed) else -1
    if first == b'"':
        after = int(np.searchsorted(quote, start)) + 1
        return int(quote[after]) + 1 if after < len(quote) else -1
    end = VALUE_ENDS.search(text, start)
    return end.start() if end else -1


def _backslashes(text: bytes) -> int:
    """How many of them end the text."""
    return len(text) - len(text.rstrip(b"\\"))
