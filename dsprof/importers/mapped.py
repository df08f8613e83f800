"""Chrome traces of any tool, by a mapping file (mapping.py): which event is what, of which rank, in which step.

A file may hold one rank or all of them. Events are complete ones (X), begins and ends (B and E, by thread; b and e, by
category and id) and moments (i). Those that no rule names are kept as marks, and explain nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from dsprof.run import RunError
from dsprof.trace import Trace
from dsprof.trace.kineto import ChromeEvents, TraceError, head_of

from .assemble import ImportedRank, clock_names, collective_ends, imported_run
from .mapped_rows import finish_ranks
from .mapped_values import LIMITS, argument_at, as_key, group_of, members_of, whole_below
from .mapping import WORDS, EventMapping, EventRule, load_packaged, packaged
from .rank_names import MOST_RANK, rank_in
from .row_table import RowTable
from .search_limit import SearchLimit, SearchTooLongError

DESCRIPTION: Final = "a Chrome trace of any tool by a mapping file (--mapping)"

MOST_NAME: Final = 512
MOST_DISTINCT: Final = 1 << 18
"""Names of events, whose rule is remembered, or that are counted."""
OTHER_NAMES: Final = "other names"
MOST_OPEN: Final = 1 << 20
"""Events that have begun and not ended."""
LATEST: Final = float(1 << 62)
MOST_NAMED: Final = 5
SPARE_RANKS: Final = 64


def recognizes(path: Path) -> bool:
    return mapping_for(path) is not None


def mapping_for(path: Path) -> EventMapping | None:
    """The mapping of dsprof's own that is for a trace, by what stands at its beginning. Never raises."""
    head = head_of(path)
    for name in packaged():
        mapping = load_packaged(name)
        if head and mapping.telling is not None and mapping.telling.search(head):
            return mapping
    return None


def read(path: Path) -> Trace:
    mapping = mapping_for(path)
    if mapping is None:
        raise RunError(f"{path}: no trace that a mapping of dsprof's own is for; name one with --mapping")
    return read_all([path], path, mapping)


def read_all(paths: Sequence[Path], named: Path, mapping: EventMapping) -> Trace:
    """The traces in files. One that cannot be read costs itself, with a warning. Raises RunError where none can, or
    where ranks are not told."""
    files = [_MappedFile(path, mapping, several=len(paths) > 1) for path in sorted(paths)]
    good = [one for one in files if not one.refused]
    if not good:
        raise RunError(f"{files[0].path}: {files[0].refused}")
    by_rank: dict[int, _MappedFile] = {}
    for one in good:
        for rank in one.tables:
            if rank in by_rank:
                raise RunError(
                    f"{one.path}: of rank {rank}, as {by_rank[rank].path.name} is; leave one of them out, or say in "
                    "the mapping where the rank is told"
                )
            by_rank[rank] = one
    ranks = sorted(by_rank)
    if not ranks:
        raise RunError(f"{good[0].path}: {good[0].nothing()}")
    if ranks[-1] >= 16 * len(ranks) + SPARE_RANKS:
        raise RunError(
            f"{by_rank[ranks[-1]].path}: `{', '.join(mapping.rank)}` tells rank {ranks[-1]}, of {len(ranks)} ranks; "
            "say with `rank` in a mapping file where the rank is told"
        )
    members = {name: of for one in good for name, of in one.members.items()}
    tables = {rank: by_rank[rank].tables.pop(rank).table() for rank in ranks}
    found = finish_ranks(tables, members, steps_together=mapping.steps_together)
    imported = [_imported(rank, found.rows[rank], by_rank[rank]) for rank in ranks]
    warnings = [f"{one.path.name[:200]} was left out: {one.refused}" for one in files if one.refused]
    warnings += [*found.warnings, *_unmapped(good, mapping)]
    if mapping.clock == "rank":
        clocks = [f"clock of rank {rank}" for rank in ranks]
    elif mapping.clock == "one":
        clocks = ["one clock"] * len(ranks)
    else:
        clocks = clock_names(["" for _ in ranks], [one.ends for one in imported])
        if len(set(clocks)) > 1:
            warnings.append(
                f"the ranks read {len(set(clocks))} clocks, which were aligned by the ends of their collectives"
            )
    run = imported_run("chrome", named, imported, found.groups, clocks, warnings=warnings)
    rows = pd.concat([found.rows[rank].assign(rank=rank) for rank in ranks], ignore_index=True)
    return Trace.of(run, rows)


def _imported(rank: int, rows: pd.DataFrame, file: _MappedFile) -> ImportedRank:
    steps = rows.loc[rows["kind"] == "step", "step"]
    return ImportedRank(
        rank, file.path.name, len(rows), int(steps.max()) if len(steps) else -1, not file.notes,
        warnings=file.take_notes(), ends=collective_ends(rows),
    )  # fmt: skip


def _unmapped(files: Iterable[_MappedFile], mapping: EventMapping) -> Iterator[str]:
    unmapped: Counter[str] = Counter()
    for one in files:
        unmapped.update(one.unmapped)
    if unmapped:
        count, total = sum(unmapped.values()), sum(one.count for one in files)
        names = ", ".join(name[:60] for name, _ in unmapped.most_common(MOST_NAMED))
        yield (
            f"{count:,} of {total:,} events fit no rule of {mapping.name} and explain nothing ({names}"
            f"{', ...' if len(unmapped) > MOST_NAMED else ''}); add rules for those that matter to a mapping file"
        )


@dataclass
class _OpenEvent:
    """An event that has begun."""

    start_ns: int
    name: str
    category: str
    args: dict[str, Any]
    pid: Any
    tid: Any


class _MappedFile:
    """One file, read. `tables`: by rank; `members`: of the groups that it tells; `refused`: why it gave nothing."""

    def __init__(self, path: Path, mapping: EventMapping, *, several: bool) -> None:
        self.path, self.refused = path, ""
        self.tables: dict[int, RowTable] = defaultdict(RowTable)
        self.members: dict[str, list[int]] = {}
        self.notes: list[str] = []
        self.unmapped: Counter[str] = Counter()
        self.count = self._odd = self._rankless = 0
        self._first_odd = ""
        self._mapping, self._several = mapping, several
        self._in_name = rank_in(path.name)
        self._processes, self._threads = dict[Any, str](), dict[Any, str]()
        self._rules: dict[tuple[str, str], tuple[EventRule | None, dict[str, str]]] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        self._limit = SearchLimit()
        self._open: dict[Any, list[_OpenEvent]] = defaultdict(list)
        self._opened = 0
        events = ChromeEvents(path)
        try:
            for found in events.lists():
                for event in found:
                    self._take(event)
        except TraceError as error:
            self.refused = f"{error}; {error.advice}"
        except OSError as error:
            self.refused = f"cannot be read ({error.strerror})"
        if events.cut:
            self.notes.append(events.cut)
        left = sum(map(len, self._open.values()))
        if left:
            self.notes.append(f"{left:,} events begin and never end; they are left out")
        self._odd += events.odd
        if self._odd:
            self.notes.append(f"{self._odd:,} events without a name or a possible time are left out {self._first_odd}")
        if self._rankless and self.tables:
            self.notes.append(f"{self._rankless:,} events tell no rank (`{', '.join(mapping.rank)}`) and are left out")
        self._open.clear()

    def take_notes(self) -> list[str]:
        """For the first of its ranks only."""
        found, self.notes = self.notes, []
        return found

    def nothing(self) -> str:
        """Why no rank has rows."""
        if self._rankless:
            where = ", ".join(self._mapping.rank)
            return (
                f"none of its events tells its rank (`{where}`); say with `rank` in a mapping file where it is told, "
                "or rename the file to rank<N>.json"
            )
        return "holds no events that last; record it again"

    def _take(self, event: dict[str, Any]) -> None:
        phase = event.get("ph")
        if phase == "M":
            self._name_track(event)
            return
        if phase not in ("X", "B", "E", "b", "e", "i", "I", "n"):
            return
        self.count += 1
        name, start = event.get("name"), event.get("ts")
        name = "" if name is None and phase in ("E", "e") else name
        if not isinstance(name, str) or start is None or not self._is_time(start):
            self._leave_out(event)
            return
        args = event.get("args")
        category = event.get("cat")
        begun = _OpenEvent(
            self._ns(start), name[:MOST_NAME], category[:MOST_NAME] if isinstance(category, str) else "",
            args if isinstance(args, dict) else {}, event.get("pid"), event.get("tid"),
        )  # fmt: skip
        if phase == "X":
            length = event.get("dur", 0)
            if not self._is_time(length):
                self._leave_out(event)
                return
            self._add(begun, self._ns(length))
        elif phase in ("i", "I", "n"):
            self._add(begun, 0)
        else:
            self._nest(phase, begun, event)

    def _nest(self, phase: str, begun: _OpenEvent, event: dict[str, Any]) -> None:
        """B and E nest in their thread; b and e belong together by id, category and name."""
        key: tuple[Any, ...] = as_key(event.get("pid")), as_key(event.get("tid"))
        if phase in ("b", "e"):
            key = begun.category, as_key(event.get("id")), begun.name
        if phase in ("B", "b"):
            if self._opened >= MOST_OPEN:
                self._leave_out(event)
                return
            self._opened += 1
            self._open[key].append(begun)
            return
        stack = self._open.get(key)
        if not stack:
            self._leave_out(event)
            return
        first = stack.pop()
        if not stack:
            del self._open[key]
        self._opened -= 1
        self.count -= 1  # two events, one thing that happened
        if begun.start_ns >= first.start_ns:
            first.args = {**first.args, **begun.args}
            self._add(first, begun.start_ns - first.start_ns)
        else:
            self._leave_out(event)

    def _add(self, event: _OpenEvent, dur_ns: int) -> None:
        rank = self._rank(event)
        if rank is None:
            self._rankless += 1
            return
        rule, told = self._rule(event.name, event.category)
        if rule is not None and rule.kind == "ignore":
            return
        row: dict[str, Any] = {"start_ns": event.start_ns, "dur_ns": dur_ns}
        track = f"thread.{as_key(event.tid)}"
        if rule is None:
            if event.name in self.unmapped or len(self.unmapped) < MOST_DISTINCT:
                self.unmapped[event.name] += 1
            else:
                self.unmapped[OTHER_NAMES] += 1
            row |= {"kind": "mark", "name": event.name, "lane": track}
        else:
            row |= {"kind": rule.kind, "name": rule.row_name or event.name, "lane": rule.lane or track}
            self._fill(row, rule, told, event, rank)
        step = self._number(self._mapping.step, event) if self._mapping.step else None
        stage = self._number(self._mapping.stage, event) if self._mapping.stage else None
        if step is not None:
            row.setdefault("step", step)
        if stage is not None:
            row.setdefault("stage", stage)
        self.tables[rank].add(row)

    def _fill(self, row: dict[str, Any], rule: EventRule, told: dict[str, str], event: _OpenEvent, rank: int) -> None:
        """The columns that the rule tells, as far as the event has them."""
        for column in (*told, *rule.places):
            value = told[column] if column in told else self._value(rule.places[column], event)
            if column == "members":
                members = sorted({*members_of(value), rank}) if value else []
                if len(members) > 1:
                    row["group"] = group_of(members)
                    self.members[row["group"]] = members
            elif column in WORDS:
                if isinstance(value, (str, int)) and str(value):
                    row[column] = str(value)[:MOST_NAME]
            else:
                number = whole_below(value, LIMITS[column])
                if number is not None:
                    row[column] = number

    def _rule(self, name: str, category: str) -> tuple[EventRule | None, dict[str, str]]:
        key = name, category
        known = self._rules.get(key)
        if known is None:
            known = self._first_fit(name, category)
            if len(self._rules) < MOST_DISTINCT:
                self._rules[key] = known
        return known

    def _first_fit(self, name: str, category: str) -> tuple[EventRule | None, dict[str, str]]:
        number = 0
        try:
            with self._limit:
                for rule in self._mapping.rules:
                    number += 1
                    told = rule.fit(name, category)
                    if told is not None:
                        return rule, told
        except SearchTooLongError:
            raise self._too_long(f"rule {number} of events", name) from None
        return None, {}

    def _too_long(self, where: str, text: str) -> RunError:
        return RunError(
            f"{self._mapping.name}: {where}: its pattern takes too long on {text[:60]!r}; write it without repeats "
            "inside repeats (a+, not (a+)+)"
        )

    def _rank(self, event: _OpenEvent) -> int | None:
        for place in self._mapping.rank:
            if place == "pid" and self._several and self._in_name is not None:
                continue
            found = self._number(place, event)
            if found is not None and found < MOST_RANK:
                return found
        return None

    def _number(self, place: str, event: _OpenEvent) -> int | None:
        return whole_below(self._value(place, event), 1 << 31)

    def _value(self, place: str, event: _OpenEvent) -> Any:
        if place == "file":
            return self._in_name
        if place in ("pid", "tid"):
            return event.pid if place == "pid" else event.tid
        if place.startswith("="):
            return place[1:]
        what, _, rest = place.partition(".")
        if what == "args":
            return argument_at(event.args, rest)
        what, _, pattern = place.partition(":")
        names = self._processes if what == "process" else self._threads
        key = as_key(event.pid) if what == "process" else (as_key(event.pid), as_key(event.tid))
        text = names.get(key, "")
        if (place, text) not in self._found:
            try:
                with self._limit:
                    match = re.search(pattern, text)
            except SearchTooLongError:
                raise self._too_long(place, text) from None
            if len(self._found) >= MOST_DISTINCT:
                self._found.clear()
            self._found[place, text] = match[1] if match is not None else None
        return self._found[place, text]

    def _name_track(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        text = args.get("name") if isinstance(args, dict) else None
        if not isinstance(text, str):
            return
        pid = as_key(event.get("pid"))
        if event.get("name") == "process_name" and len(self._processes) < MOST_DISTINCT:
            self._processes[pid] = text[:MOST_NAME]
        elif event.get("name") == "thread_name" and len(self._threads) < MOST_DISTINCT:
            self._threads[pid, as_key(event.get("tid"))] = text[:MOST_NAME]

    def _is_time(self, value: Any) -> bool:
        return type(value) in (int, float) and 0 <= value * self._mapping.unit_ns < LATEST  # NaN is neither

    def _ns(self, value: float) -> int:
        """Exact where it is whole; of one with a fraction the whole part is."""
        return int(value) * self._mapping.unit_ns + round(value % 1 * self._mapping.unit_ns)

    def _leave_out(self, event: dict[str, Any]) -> None:
        self._odd += 1
        self._first_odd = self._first_odd or f"such as {repr(event)[:160]}"
