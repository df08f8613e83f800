"""What tasks send back, in few bytes: bit for bit what they found.

Ranks that do the same return the same classes, names and words, and arrays of other numbers. So of the results of many
ranks (`ByRank`) what is alike is sent once, and arrays lie one behind the other, number by number, byte by byte:

    moments   a rank's times are sent once each, in order, as the distance from the one before. Arrays of times hold
              places among them, which are alike on ranks alike, whatever the clock shows.
    the rest  numbers in as few bytes as they need. The first bytes of all, then the second ones, and so on: of
              durations that are about as long only the last bytes differ.

All of it is compressed then. A job of 20 steps of 50 rows sends a tenth of what its pickles take.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

Result = TypeVar("Result")
Array = npt.NDArray[Any]

CODEC: Final = "zstd"
PLAIN: Final = "iufb"
"""Kinds of arrays that are put aside: numbers, and yes or no."""
_Result = tuple[list[Array], list[int], list[int]]
"""The arrays and whole numbers of one, and where its names are."""
INT64: Final = np.iinfo(np.int64)
NARROW: Final = (np.int8, np.int16, np.int32)
"""Types in which whole numbers are sent, if all of them fit. What is wider is a time."""


class ByRank(dict[int, Result]):
    """What was found of each rank, of the same kind: what they have in common is sent once."""


def pack(found: Any) -> bytes:
    """Anything that can be pickled, of which the results in a `ByRank` take little room. Raises what pickle does."""
    stream, names = _Stream(), _Names()
    shape = _take_apart(found, names)
    content = shape.content, _add(stream, [shape]), [_pack_ranks(stream, each, names) for each in shape.by_rank]
    return pickle.dumps((names.every, content, *stream.compressed()), pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """What `pack` was given. Like a pickle, it is for what this program's own processes send."""
    names, (content, leaves, by_rank), compressed, size = pickle.loads(packed)
    stream = _Source(pa.decompress(compressed, size, CODEC, asbytes=False))
    (of_all,) = _leaves(stream, leaves)
    every = [_unpack_ranks(stream, one, names) for one in by_rank]
    return _put_together(content, of_all, names, every)


# --- results taken apart


class _Names:
    """Names of columns and the words of categories, which nothing changes: tables alike share them."""

    def __init__(self) -> None:
        self.every: list[Any] = []
        self._place: dict[Any, int] = {}
        self._seen: dict[int, tuple[Any, int | None]] = {}

    def word(self, item: str) -> int:
        """Where it is among `every`."""
        place = self._place.get(item)
        if place is None:
            place = self._place[item] = len(self.every)
            self.every.append(item)
        return place

    def place(self, item: Any) -> int | None:
        """Where it is among `every`; None: it holds other things than names."""
        if id(item) not in self._seen:
            self._seen[id(item)] = item, self._find(item)
        return self._seen[id(item)][1]

    def _find(self, item: Any) -> int | None:
        if isinstance(item, pd.CategoricalDtype):
            key: Any = self.place(item.categories), item.ordered
            if key[0] is None:
                return None
        elif item.dtype.kind == "O":
            words = tuple(item.tolist())
            if not all(type(word) is str for word in words):
                return None
            key = type(item.array), item.dtype, tuple(item.names), words
        else:
            return None
        if key not in self._place:
            self._place[key] = len(self.every)
            self.every.append(item)
        return self._place[key]


class _TakenApart(pickle.Pickler):
    """Pickles one result without its arrays, whole numbers and names."""

    def __init__(self, into: io.BytesIO, names: _Names) -> None:
        super().__init__(into, pickle.HIGHEST_PROTOCOL)
        self._names = names
        self.names: list[int] = []
        self.arrays: list[Array] = []
        self.numbers: list[int] = []
        self.by_rank: list[ByRank[Any]] = []
        self.content = b""
        self._place: dict[int, int] = {}
        self._words: dict[str, str] = {}

    def persistent_id(self, item: Any) -> Any:
        kind = type(item)
        if kind is str:
            if item not in self._words:
                self._words[item] = f"{len(self.names)}"  # the same text each time is a few bytes in a pickle
                self.names.append(self._names.word(item))
            return self._words[item]
        if kind is int:
            if not INT64.min <= item <= INT64.max:
                return None
            self.numbers.append(item)
            return -len(self.numbers)
        if kind is np.ndarray:
            if item.dtype.kind not in PLAIN or not item.dtype.isnative or item.dtype.itemsize > 8:
                return None
            place = self._place.setdefault(id(item), len(self.arrays))
            if place == len(self.arrays):
                self.arrays.append(item)  # which also keeps its id its own
            return place
        if kind is pd.Index or kind is pd.CategoricalDtype:
            name = self._names.place(item)
            if name is None:
                return None
            self.names.append(name)
            return f"{len(self.names) - 1}"
        if kind is ByRank:
            self.by_rank.append(item)
            return f"ranks {len(self.by_rank) - 1}"
        return None

    @property
    def alike(self) -> tuple[Any, ...]:
        """What results have in common that are packed together."""
        counts = len(self.numbers), len(self.names)
        return self.content, counts, tuple((of.dtype.str, of.ndim, _by_column(of)) for of in self.arrays)


def _by_column(array: Array) -> bool:
    """Whether it lies in memory column by column: sums of floats depend on that."""
    return array.ndim > 1 and not array.flags.c_contiguous and bool(array.flags.f_contiguous)


def _take_apart(result: Any, names: _Names) -> _TakenApart:
    into = io.BytesIO()
    shape = _TakenApart(into, names)
    shape.dump(result)
    shape.content = into.getvalue()
    return shape


class _Restored(pickle.Unpickler):
    def __init__(self, content: bytes, leaves: _Result, names: Sequence[Any], by_rank: Sequence[ByRank[Any]]) -> None:
        super().__init__(io.BytesIO(content))
        self._arrays, self._numbers, places = leaves
        self._names, self._by_rank = [names[place] for place in places], by_rank

    def persistent_load(self, place: Any) -> Any:
        if type(place) is int:
            return self._arrays[place] if place >= 0 else self._numbers[-1 - place]
        if place.startswith("ranks"):
            return self._by_rank[int(place[6:])]
        return self._names[int(place)]


def _put_together(content: bytes, leaves: _Result, names: Sequence[Any], by_rank: Sequence[ByRank[Any]] = ()) -> Any:
    return _Restored(content, leaves, names, by_rank).load()


# --- results of ranks


@dataclass(frozen=True)
class _OneShape:
    """Results of one shape. places: which of the ranks have it."""

    content: bytes
    places: list[int]
    leaves: _Leaves


def _pack_ranks(stream: _Stream, found: ByRank[Any], names: _Names) -> tuple[list[int], list[_OneShape]]:
    alike: dict[Any, list[tuple[int, _TakenApart]]] = {}
    for place, result in enumerate(found.values()):
        shape = _take_apart(result, names)
        if shape.by_rank:
            raise pickle.PicklingError("a result of a rank that holds results of ranks")
        alike.setdefault(shape.alike, []).append((place, shape))
    packed = []
    for shapes in alike.values():
        places = [place for place, _ in shapes]
        packed.append(_OneShape(shapes[0][1].content, places, _add(stream, [shape for _, shape in shapes])))
    return [*found], packed


def _unpack_ranks(stream: _Source, packed: tuple[list[int], list[_OneShape]], names: Sequence[Any]) -> ByRank[Any]:
    ranks, alike = packed
    found: list[Any] = [None] * len(ranks)
    for one in alike:
        for place, leaves in zip(one.places, _leaves(stream, one.leaves), strict=True):
            found[place] = _put_together(one.content, leaves, names)
    return ByRank(zip(ranks, found, strict=True))


# --- arrays


@dataclass(frozen=True)
class _Leaves:
    """How the arrays and numbers of results that are alike were sent.

    count: of results; numbers, names: of each. moments: whether they have times.
    arrays: of each leaf its type, dimensions, whether it lies by column, and whether it holds times.
    """

    count: int
    numbers: int
    names: int
    moments: bool
    arrays: tuple[tuple[str, int, bool, bool], ...]


def _add(stream: _Stream, shapes: Sequence[_TakenApart]) -> _Leaves:
    """Send these arrays and numbers."""
    first = shapes[0]
    lying = [_by_column(of) for of in first.arrays]
    stream.whole(np.array([shape.numbers for shape in shapes], np.int64).T.ravel())
    stream.whole(np.array([shape.names for shape in shapes], np.int64).T.ravel())
    stream.whole(np.array([[n for of in shape.arrays for n in of.shape] for shape in shapes], np.int64).T.ravel())
    flat = [[_flat(shape.arrays[k], lying[k]) for shape in shapes] for k in range(len(first.arrays))]
    joined = [np.concatenate(of) for of in flat]
    timed = [of.dtype == np.int64 and _narrowest(of) is np.int64 for of in joined]
    times = [k for k, is_time in enumerate(timed) if is_time]
    if times:
        moments = [_distinct(np.concatenate([flat[k][i] for k in times])) for i in range(len(shapes))]
        stream.whole(np.array([len(of) for of in moments], np.int64))
        stream.steps(np.concatenate(moments))
    for k, values in enumerate(joined):
        if timed[k]:
            places = [np.searchsorted(of, mine) for of, mine in zip(moments, flat[k], strict=True)]
            stream.steps(np.concatenate(places))
        elif values.dtype.kind in "iu":
            stream.whole(values)
        else:
            stream.plain(values)
    kinds = tuple(
        (of.dtype.str, of.ndim, column, is_time) for of, column, is_time in zip(first.arrays, lying, timed, strict=True)
    )
    return _Leaves(len(shapes), len(first.numbers), len(first.names), bool(times), kinds)


def _leaves(stream: _Source, sent: _Leaves) -> list[_Result]:
    """The arrays and the numbers of each result."""
    count = sent.count
    numbers = stream.whole().reshape(sent.numbers, count).T.tolist()
    names = stream.whole().reshape(sent.names, count).T.tolist()
    dimensions = sum(of[1] for of in sent.arrays)
    sizes = stream.whole().reshape(dimensions, count)
    begins = moments = np.empty(0, np.int64)
    if sent.moments:
        counts = stream.whole()
        begins, moments = np.cumsum(counts) - counts, stream.steps()
    arrays: list[list[Array]] = [[] for _ in range(count)]
    row = 0
    for dtype, ndim, by_column, is_time in sent.arrays:
        shape = sizes[row : row + ndim]
        row += ndim
        lengths = shape.prod(axis=0) if ndim else np.ones(count, np.int64)
        if is_time:
            values: Array = moments[stream.steps() + np.repeat(begins, lengths)]
        elif np.dtype(dtype).kind in "iu":
            values = stream.whole().astype(dtype, copy=False)
        else:
            values = stream.plain(np.dtype(dtype))
        ends, nothing = np.cumsum(lengths).tolist(), values[:0]  # which most arrays of most ranks are
        for i, (end, size) in enumerate(zip(ends, shape.T.tolist(), strict=True)):
            mine = values[end - int(lengths[i]) : end] if lengths[i] else nothing
            if ndim != 1:
                mine = mine.reshape(size[::-1]).T if by_column else mine.reshape(size)
            arrays[i].append(mine)
    return [*zip(arrays, numbers, names, strict=True)]


def _flat(array: Array, by_column: bool) -> Array:
    flat: Array = (array.T if by_column else array).ravel()
    return flat


def _distinct(values: Array) -> Array:
    values = np.sort(values)
    found: Array = values[np.append(True, values[1:] != values[:-1])[: len(values)]]
    return found


def _narrowest(values: Array) -> type[np.generic]:
    """The smallest type of whole numbers that holds these."""
    if not len(values):
        return np.int8
    low, high = values.min(), values.max()
    for dtype in NARROW:
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    return np.int64


class _Stream:
    """Arrays on their way into bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def whole(self, values: Array) -> None:
        """Whole numbers, in the smallest type that holds them."""
        if values.dtype == np.uint64:
            values = values.view(np.int64)
        self.plain(values.astype(_narrowest(values), copy=False), told=True)

    def steps(self, values: Array) -> None:
        """Whole numbers as the distance of each from the one before. What is too far for 64 bits comes round again."""
        self.whole(np.diff(values.astype(np.int64, copy=False), prepend=np.int64(0)))

    def plain(self, values: Array, told: bool = False) -> None:
        """The first byte of each, then the second ones, and so on. told: with their type."""
        head = np.array([len(values), values.dtype.itemsize if told else 0], np.int64).tobytes()
        width = values.dtype.itemsize
        planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width).T
        self._parts += [head, planes.tobytes()]

    def compressed(self) -> tuple[bytes, int]:
        """All of it, and how long it was."""
        every = b"".join(self._parts)
        return pa.compress(every, CODEC, asbytes=True), len(every)


class _Source:
    """The same on their way back."""

    def __init__(self, content: pa.Buffer) -> None:
        self._content = np.frombuffer(content, np.uint8)
        self._at = 0

    def whole(self) -> Array:
        return self.plain(None).astype(np.int64)

    def steps(self) -> Array:
        return np.cumsum(self.whole())

    def plain(self, dtype: np.dtype[Any] | None) -> Array:
        count, width = self._take(16).view(np.int64).tolist()
        kind = np.dtype(f"i{width}") if dtype is None else dtype
        planes = self._take(count * kind.itemsize).reshape(kind.itemsize, count)
        return np.ascontiguousarray(planes.T).reshape(-1).view(kind)

    def _take(self, count: int) -> Array:
        begin, self._at = self._at, self._at + count
        return self._content[begin : self._at].copy()
