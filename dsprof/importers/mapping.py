"""Mapping files: what the events of some tool's Chrome trace are, in the trace's words.

    # mine.toml
    rank = ["args.rank", "pid"]          # where an event's rank is told; the first that is a number counts
    step = "args.iteration"              # where its step is told, if it is

    [[events]]
    name = "^all_?reduce(_(?P<group>\\w+))?"   # a regular expression that is found in the event's name
    kind = "comm"
    as = "all_reduce"
    bytes = "args.size"

The first rule that fits counts. Places are `args.KEY` (`args.A.B`: B in A), `pid`, `tid`, `file` (the number in the
file's name), `process:REGEX` and `thread:REGEX` (the number in what the trace calls them); `=TEXT` is itself. Named
groups of a rule's patterns fill the columns of their names. docs/importing.md has all of it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from dsprof.regular_files import read_bytes
from dsprof.run import RunError

KINDS: Final = (
    "step", "phase", "module", "comm", "wait", "pipe", "copy", "kernel", "launch", "pause", "mark", "ignore",
)  # fmt: skip
"""What a rule may say that an event is: a kind of the trace's, or `ignore`."""
NUMBERS: Final = ("step", "stage", "microbatch", "seq", "bytes", "peer", "corr")
WORDS: Final = ("group", "module", "purpose", "dtype")
COLUMNS: Final = (*NUMBERS, *WORDS, "members")
"""Columns that a rule, or a named group of its patterns, may fill. `members`: the ranks of a communication's group."""
UNITS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
CLOCKS: Final = ("one", "rank", "unknown")
LARGEST: Final = 1 << 20
"""Bytes of a mapping file."""
PLACE: Final = re.compile(r"args\.\S.*|pid|tid|file|process:.+|thread:.+|=.+", re.DOTALL)


@dataclass(frozen=True)
class EventRule:
    """kind, row_name (empty: the event's), lane (empty: that of its thread); `places`: column -> where its value is."""

    kind: str
    name: re.Pattern[str]
    category: re.Pattern[str]
    row_name: str = ""
    lane: str = ""
    places: Mapping[str, str] = field(default_factory=dict)

    def fit(self, name: str, category: str) -> dict[str, str] | None:
        """The columns that the patterns' named groups fill; None: an event of this name and category is another
        rule's."""
        in_name, in_category = self.name.search(name), self.category.search(category)
        if in_name is None or in_category is None:
            return None
        found = {**in_category.groupdict(), **in_name.groupdict()}
        return {column: text for column, text in found.items() if text is not None}


@dataclass(frozen=True)
class EventMapping:
    """name: as it is told. rank, step, stage: places. unit_ns: of `ts` and `dur`. clock: of CLOCKS. telling: what
    stands at the beginning of the traces that it is for. steps_together: the tool lets a step begin at one moment on
    all ranks, wherever it did."""

    name: str
    rank: tuple[str, ...]
    step: str
    stage: str
    unit_ns: int
    clock: str
    rules: tuple[EventRule, ...]
    telling: re.Pattern[bytes] | None = None
    steps_together: bool = False


def packaged() -> tuple[str, ...]:
    """Names of the mappings that come with dsprof."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml")))


@cache
def load_packaged(name: str) -> EventMapping:
    return _mapping(name, tomllib.loads((_folder() / f"{name}.toml").read_text()))


def load_mapping(name: str) -> EventMapping:
    """That of a file, or one that comes with dsprof. Raises RunError that says what is wrong with it, and where."""
    if name in packaged():
        return load_packaged(name)
    path = Path(name)
    if not path.exists():
        raise RunError(f"--mapping {name}: no such file, and dsprof has {' and '.join(packaged())}; name one of them")
    try:
        content = tomllib.loads(read_bytes(path, LARGEST).decode())
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path}: no TOML ({str(error)[:200]}); docs/importing.md has an example") from error
    return _mapping(str(path), content)


def _folder() -> Any:
    return files(__package__) / "mappings"


def _mapping(name: str, content: dict[str, Any]) -> EventMapping:
    known = {"rank", "step", "steps_together", "stage", "unit", "clock", "telling", "events"}
    strange = sorted(content.keys() - known)
    if strange:
        raise _wrong(name, f"`{strange[0]}` is none of {', '.join(sorted(known))}")
    unit, clock = content.get("unit", "us"), content.get("clock", "unknown")
    if unit not in UNITS:
        raise _wrong(name, f"unit {unit!r} is none of {', '.join(UNITS)}")
    if clock not in CLOCKS:
        raise _wrong(name, f"clock {clock!r} is none of {', '.join(CLOCKS)}")
    events = content.get("events")
    if not isinstance(events, list) or not events or not all(isinstance(rule, dict) for rule in events):
        raise _wrong(name, "it has no [[events]], which say what events are")
    together = content.get("steps_together", False)
    if not isinstance(together, bool):
        raise _wrong(name, f"steps_together {together!r} is neither true nor false")
    rank = content.get("rank", ["file", "pid"])
    telling = content.get("telling")
    return EventMapping(
        name,
        rank=tuple(_place(name, "rank", one) for one in (rank if isinstance(rank, list) else [rank])),
        step=_place(name, "step", content["step"]) if "step" in content else "",
        stage=_place(name, "stage", content["stage"]) if "stage" in content else "",
        unit_ns=UNITS[unit],
        clock=clock,
        rules=tuple(_rule(name, number, rule) for number, rule in enumerate(events, 1)),
        telling=_pattern(name, "telling", telling) if telling is not None else None,
        steps_together=together,
    )


def _rule(name: str, number: int, rule: dict[str, Any]) -> EventRule:
    where = f"rule {number} of events"
    strange = sorted(rule.keys() - {"name", "category", "kind", "as", "lane", *COLUMNS})
    if strange:
        raise _wrong(name, f"{where}: `{strange[0]}` is no column that it can fill ({', '.join(COLUMNS)})")
    kind = rule.get("kind")
    if kind not in KINDS:
        raise _wrong(name, f"{where}: kind {kind!r} is none of {', '.join(KINDS)}")
    if "name" not in rule and "category" not in rule:
        raise _wrong(name, f"{where}: it has neither a name nor a category, so it fits every event")
    for key in ("as", "lane"):
        if not isinstance(rule.get(key, ""), str):
            raise _wrong(name, f"{where}: {key} is no text")
    patterns = {key: _pattern(name, f"{where}: {key}", rule.get(key, "")) for key in ("name", "category")}
    for pattern in patterns.values():
        unknown = sorted(pattern.groupindex.keys() - set(COLUMNS))
        if unknown:
            raise _wrong(name, f"{where}: (?P<{unknown[0]}>...) is no column that it can fill ({', '.join(COLUMNS)})")
    return EventRule(
        kind, patterns["name"], patterns["category"], rule.get("as", ""), rule.get("lane", ""),
        {column: _place(name, f"{where}: {column}", rule[column]) for column in COLUMNS if column in rule},
    )  # fmt: skip


def _place(name: str, where: str, text: Any) -> str:
    if not isinstance(text, str) or not PLACE.fullmatch(text):
        raise _wrong(
            name, f"{where}: {text!r} is no place: args.KEY, pid, tid, file, process:REGEX, thread:REGEX, =TEXT"
        )
    if text.startswith(("process:", "thread:")):
        pattern = _pattern(name, where, text.partition(":")[2])
        if pattern.groups < 1:
            raise _wrong(name, rf"{where}: {text!r} has no group, such as rank (\d+), that is the number")
    return text


def _pattern(name: str, where: str, text: Any) -> re.Pattern[Any]:
    if not isinstance(text, str):
        raise _wrong(name, f"{where} is no text")
    try:
        return re.compile(text.encode() if where == "telling" else text)
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(name, f"{where}: {text!r} is no regular expression ({error})") from error


def _wrong(name: str, what: str) -> RunError:
    return RunError(f"{name}: {what}; docs/importing.md says what a mapping file holds")
