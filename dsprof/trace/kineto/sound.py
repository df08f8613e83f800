"""Whether events have what they should have: a list of them as arrays, or one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .events import UNKNOWN

Int = npt.NDArray[np.int64]

LATEST_US: Final = 9.0e15
"""The year 2255. What is later, or before the epoch, is no time."""


class Odd(Exception):
    """One of these events lacks what it should have."""


def ns_of(microseconds: Sequence[Any]) -> Int:
    """Whole or with a fraction, as ns. Raises Odd and what a wrong type raises."""
    values = np.array(microseconds)
    if values.dtype.kind not in "iuf":
        raise Odd
    if not ((values >= 0) & (values < LATEST_US)).all():  # NaN is neither
        raise Odd
    if values.dtype.kind in "iu":
        return values.astype(np.int64) * 1000
    whole = np.floor(values)
    result: Int = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return result


def whole(values: list[Any], least: int = UNKNOWN) -> Int:
    found = np.array(values)
    if found.dtype.kind not in "iu" or (len(found) and (found.min() < least or found.max() >= 1 << 62)):
        raise Odd
    return found.astype(np.int64)


# --- the same of one event


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < LATEST_US


def _is_whole(value: Any, least: int = UNKNOWN) -> bool:
    return type(value) is int and least <= value < 1 << 31


def has_times_and_thread(event: Mapping[str, Any]) -> bool:
    named = isinstance(event.get("name"), str) and type(event.get("tid")) in (int, str)
    return named and _is_time(event.get("ts")) and _is_time(event.get("dur"))


def _args(event: Mapping[str, Any]) -> dict[str, Any] | None:
    args = event.get("args")
    return args if isinstance(args, dict) else None


def is_call(event: Mapping[str, Any]) -> bool:
    args = _args(event)
    return has_times_and_thread(event) and args is not None and _is_whole(args.get("correlation", UNKNOWN))


def is_of_device(event: Mapping[str, Any]) -> bool:
    args = _args(event)
    if args is None or not (isinstance(event.get("name"), str) and _is_time(event.get("ts"))):
        return False
    numbers = (args.get(key, 0) for key in ("device", "stream", "correlation"))
    size = args.get("bytes", UNKNOWN)
    return _is_time(event.get("dur")) and all(map(_is_whole, numbers)) and type(size) is int and -1 <= size < 1 << 62


def is_stream_wait(event: Mapping[str, Any]) -> bool:
    args = _args(event)
    if args is None or not _is_time(event.get("ts")):
        return False
    numbers = (args.get("device", 0), args.get("stream"), args.get("correlation", UNKNOWN), args.get("wait_on_stream"),
               args.get("wait_on_cuda_event_record_corr_id"))  # fmt: skip
    return all(map(_is_whole, numbers))


def is_memory_sample(event: Mapping[str, Any]) -> bool:
    args = _args(event)
    if args is None or not _is_time(event.get("ts")):
        return False
    sizes = (args.get(key, UNKNOWN) for key in ("Total Allocated", "Total Reserved"))
    return (
        _is_whole(args.get("Device Type"))
        and _is_whole(args.get("Device Id"), -1)
        and all(type(size) is int and -1 <= size < 1 << 62 for size in sizes)
    )
