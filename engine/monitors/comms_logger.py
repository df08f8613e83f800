"""`comms_logger`: communications by kind and message size. Times are those of the lanes; nothing is synchronized."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..hooks import Span

MAX_ROWS: Final = 1000
"""Distinct messages that are counted apart. Sizes met later are counted with the next power of two."""

RECENT: Final = 10_000
"""Communications that the stragglers' table looks back on."""


UNKNOWN: Final = -1
"""Size of a message whose receiver learns it on the way."""

SYNCHRONIZING: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds in which every rank waits for the last one."""


class LoggedMessage(NamedTuple):
    """What is counted together."""

    op: str
    ranks: int
    bytes: int
    """As nccl-tests' S: the larger of total input and output of one rank. UNKNOWN for what a pipeline receives."""


class Sample(NamedTuple):
    """One communication, for joining with that of other ranks."""

    group: str | None
    seq: int
    message: LoggedMessage
    dur_ns: int


Gather = Callable[[list[Sample]], list[list[Sample]]]
"""Every rank's samples, in the order of ranks; all ranks call it."""


@dataclass
class Tally:
    """What is known of one kind of message."""

    count: int = 0
    bytes: int = 0
    ns: int = 0

    def algbw(self) -> float | None:
        """Bytes/ns, which is GB/s; None if sizes or times are not known."""
        return self.bytes / self.ns if self.bytes >= 0 and self.ns else None


def bus_factor(op: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests defines it: what each link carries of a message."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


@dataclass(frozen=True)
class Straggling:
    """What waiting for the last rank has cost one kind of message."""

    message: LoggedMessage
    count: int
    comm_ns: int
    """Sum of the shortest durations over the ranks: the last to arrive has it, and waited for nobody."""
    waited_ns: int
    """Sum over all ranks of what theirs lasted beyond it."""
    last_rank: int
    """The rank that was last most often."""
    last_count: int


class CommsLogger:
    """Counts every communication. `log_summary` prints the table.

    `only`: names of the kinds to count; None counts all. `group_size`: ranks of a group, by the name spans give.
    With `lanes_alone` only the lanes know how long a communication took: on a GPU the host does not wait for others.
    """

    def __init__(
        self,
        *,
        rank: int,
        group_size: Callable[[str | None], int],
        only: Collection[str] | None = None,
        lanes_alone: bool = False,
        verbose: bool = False,
        gather: Gather | None = None,
        show: Callable[[str], None] = print,
    ) -> None:
        self._rank = rank
        self._group_size = group_size
        self._only = only
        self._lanes_alone = lanes_alone
        self._verbose = verbose
        self._gather = gather
        self._show = show
        self._lock = threading.Lock()  # each lane reports on its own thread
        self._tallies: defaultdict[LoggedMessage, Tally] = defaultdict(Tally)
        self._recent: deque[Sample] = deque(maxlen=RECENT)

    def begin(self, span: Span) -> None:
        """Only ends count."""

    def end(self, span: Span) -> None:
        if span.kind != "comm" or (self._only is not None and span.name not in self._only):
            return
        size = UNKNOWN if span.bytes is not None and span.bytes < 0 else span.bytes or 0
        ns = 0 if self._lanes_alone and not span.lane.startswith("comm.") else span.dur_ns
        message = LoggedMessage(span.name, self._group_size(span.group), size)
        with self._lock:
            if message not in self._tallies and len(self._tallies) >= MAX_ROWS:
                message = message._replace(bytes=1 << (size - 1).bit_length() if size > 0 else size)
            tally = self._tallies[message]
            tally.count += 1
            tally.bytes += size
            tally.ns += ns
            if span.seq is not None and ns:
                self._recent.append(Sample(span.group, span.seq, message, ns))
        if self._verbose and self._rank == 0:
            algbw, busbw = _bandwidths(message, Tally(1, size, ns))
            self._show(
                f"comm op: {span.name} | time (ms): {_ms(ns)} | msg size: {in_binary(size)} | "
                f"algbw (GB/s): {algbw} | busbw (GB/s): {busbw}"
            )

    def tallies(self) -> dict[LoggedMessage, Tally]:
        """A copy of what was counted so far."""
        with self._lock:
            return {message: Tally(t.count, t.bytes, t.ns) for message, t in sorted(self._tallies.items())}

    def log_summary(self, show_straggler: bool = False) -> None:
        """Print the table, on rank 0. With `show_straggler` every rank must call this: recent samples are exchanged."""
        with self._lock:
            recent = list(self._recent)
        if self._rank == 0:
            self._show("\n".join(_summary(self.tallies())))
        if show_straggler:
            gathered = [recent] if self._gather is None else self._gather(recent)
            if self._rank == 0:
                self._show("\n".join(_straggler_table(stragglers(gathered))))

    def reset(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self._tallies.clear()
            self._recent.clear()


def stragglers(samples: list[list[Sample]]) -> list[Straggling]:
    """What waiting for the last cost, by kind of message, from every rank's samples.

    Communications are joined by group and number; one that is missing on a rank of its group, since that looks back
    less far, is left out. So are those in which nobody waits for the last, such as broadcasts.
    """
    joined: defaultdict[tuple[str | None, int], dict[int, Sample]] = defaultdict(dict)
    for rank, mine in enumerate(samples):
        for sample in mine:
            joined[sample.group, sample.seq][rank] = sample
    complete: defaultdict[LoggedMessage, list[dict[int, int]]] = defaultdict(list)
    for found in joined.values():
        message = next(iter(found.values())).message
        if message.op in SYNCHRONIZING and len(found) == message.ranks > 1:
            complete[message].append({rank: sample.dur_ns for rank, sample in found.items()})
    return [_straggling(message, durations) for message, durations in sorted(complete.items())]


def _straggling(message: LoggedMessage, durations: list[dict[int, int]]) -> Straggling:
    comm_ns = sum(min(ns.values()) for ns in durations)
    last = Counter(min(ns, key=ns.__getitem__) for ns in durations)
    ((rank, times),) = last.most_common(1)
    waited_ns = sum(sum(ns.values()) - len(ns) * min(ns.values()) for ns in durations)
    return Straggling(message, len(durations), comm_ns, waited_ns, rank, times)


def _summary(tallies: dict[LoggedMessage, Tally]) -> Iterator[str]:
    yield _columns(
        "Comm. Op", "Ranks", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "algbw (GB/s)",
        "busbw (GB/s)",
    )  # fmt: skip
    for message, tally in tallies.items():
        yield _columns(
            message.op, message.ranks, in_binary(message.bytes), tally.count, _ms(tally.ns),
            _ms(tally.ns / tally.count), *_bandwidths(message, tally),
        )  # fmt: skip


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}" if ns else "-"


def _bandwidths(message: LoggedMessage, tally: Tally) -> tuple[str, str]:
    """algbw and busbw, as they are printed."""
    algbw = tally.algbw()
    if algbw is None:
        return "-", "-"
    return f"{algbw:.2f}", f"{algbw * bus_factor(message.op, message.ranks):.2f}"


def _straggler_table(rows: Iterable[Straggling]) -> Iterator[str]:
    yield "Breakdown with straggler effect"
    yield _columns(
        "Comm. Op", "Ranks", "Message Size", "Count", "Avg comm lat(ms)", "Total waited(ms)", "Mostly last",
        "of the time",
    )  # fmt: skip
    for row in rows:
        yield _columns(
            row.message.op, row.message.ranks, in_binary(row.message.bytes), row.count,
            f"{row.comm_ns / 1e6 / row.count:.2f}", f"{row.waited_ns / 1e6:.2f}", f"rank {row.last_rank}",
            f"{100 * row.last_count / row.count:.0f} %",
        )  # fmt: skip


def _columns(op: str, ranks: object, *others: object) -> str:
    return f"{op:<16}{ranks!s:>6}" + "".join(f"{other!s:>19}" for other in others)


def in_binary(size: int) -> str:
    """A number of bytes, as DeepSpeed writes it: `1.5 MB` is 1.5 * 2**20. A dash if it is not known."""
    if size < 0:
        return "-"
    units = ("B", "KB", "MB", "GB")
    power = min(max(0, size.bit_length() - 1) // 10, len(units) - 1)
    return f"{size / 1024**power:.4g} {units[power]}"
