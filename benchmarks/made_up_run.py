"""A made-up run, as `dsprof run` leaves one: run.json and one Parquet file a rank.

Eight ranks a host, whose clocks are apart and drift; the ranks of a host reduce activations with one another in every
layer (of a run of at least eight), and all reduce their gradients in buckets, which they wait for by name. What is
wrong with the run is planted (`Plant`); where nothing is, one rank is slower than the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dsprof.run import RankInfo

RANKS_A_HOST = 8
US, MS = 1_000, 1_000_000
FIXED = 9
"""Rows of a step that are neither modules nor communication: a step, five phases, three gauges."""
DRIFT_PPM = 5.0
LATER_OF_ALL = 1.5
"""A rank leaves a reduction of all ranks, at most, so many times as much later than the first as one of its host."""


def layout(ranks: int, rows: int) -> tuple[int, int, int, int]:
    """Layers, buckets, modules and reductions of activations in a step of `rows` rows."""
    layers, buckets = max(rows // 20, 1), max(rows // 25, 1)
    reductions = 2 * layers if ranks >= RANKS_A_HOST else 0
    modules = rows - FIXED - 2 * reductions - 2 * buckets
    if modules < layers:
        raise SystemExit(f"{rows} rows a step are too few")
    return layers, buckets, modules, reductions


def bucket_bytes(buckets: int) -> np.ndarray:
    return (1 << 20) * (1 + np.arange(buckets) % 3)


@dataclass(frozen=True)
class Plant:
    """What is planted in a run, by rank and step [R, S], or what broadcasts to that.

    work:     how many times as long forward and backward take
    elements: given to forward
    data_ms:  how much longer the loop waits for its DataLoader
    pause_ms: how long Python's garbage collector stops the rank in each forward; 0: not at all
    offset_ns, drift_ppm: of the clock of each host, [hosts]; None: an hour apart each, and 5 ppm
    tail_ns:  by how much later than its host's first each rank leaves a reduction, at most, [R, 1]: paths are unequal
    link:     how many times as long reductions among the ranks of a host take, [hosts, S], or what broadcasts to that
    """

    work: np.ndarray = field(default_factory=lambda: np.ones((1, 1)))
    elements: np.ndarray = field(default_factory=lambda: np.full((1, 1), 4096.0))
    data_ms: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    pause_ms: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    offset_ns: np.ndarray | None = None
    drift_ppm: np.ndarray | None = None
    tail_ns: np.ndarray = field(default_factory=lambda: np.full((1, 1), 20.0 * US))
    link: np.ndarray = field(default_factory=lambda: np.ones((1, 1)))

    @staticmethod
    def one_slow(ranks: int) -> Plant:
        return Plant(work=np.where(np.arange(ranks) == ranks // 2, 1.15, 1.0)[:, None])

    def clock(self, host: int) -> tuple[float, float]:
        """How far a host's clock is ahead at the first moment, ns, and what it gains in a ns."""
        ahead = host * 3_600e9 if self.offset_ns is None else float(self.offset_ns[host])
        drift = DRIFT_PPM * host if self.drift_ppm is None else float(self.drift_ppm[host])
        return ahead, drift * 1e-6


FIRST_NS = 10e9
"""When a run begins."""
WOKEN_NS = 4.0 * US
"""How much later a thread goes on than what it waited for had ended."""


class Timeline:
    """When what happens, [R, S, ...] in ns on one clock: every rank's work is drawn, the rest follows from it."""

    def __init__(self, ranks: int, steps: int, rows: int, seed: int = 0, plant: Plant | None = None) -> None:
        draw = np.random.default_rng(seed)
        self.plant = plant = Plant.one_slow(ranks) if plant is None else plant
        self.elements = np.broadcast_to(plant.elements, (ranks, steps))
        self.pause = np.broadcast_to(plant.pause_ms, (ranks, steps)) * MS
        self.ranks, self.steps = ranks, steps
        self.layers, self.buckets, self.modules, self.reductions = layout(ranks, rows)
        shape = (ranks, steps)
        slow = plant.work

        def work(ms: float, share: float = 0.02) -> np.ndarray:
            return ms * MS * np.maximum(1 + share * draw.standard_normal(shape), 0.2)

        def teams(when: np.ndarray) -> np.ndarray:
            """The last of each host's ranks."""
            first = np.arange(0, ranks, RANKS_A_HOST)
            return np.repeat(np.maximum.reduceat(when, first), RANKS_A_HOST, axis=0)[:ranks]

        self.optimizer = work(5.0)
        self.data = work(2.0, 0.2) + plant.data_ms * MS
        self.issue = np.zeros((*shape, 2 * self.layers))
        self.end = np.zeros_like(self.issue)
        self.bucket_issue = np.zeros((*shape, self.buckets))
        hosts = -(-ranks // RANKS_A_HOST)
        link = np.repeat(np.broadcast_to(plant.link, (hosts, steps)), RANKS_A_HOST, axis=0)[:ranks]
        now = self.optimizer * 0.0 + np.roll(self.optimizer, 1, axis=1) + self.data
        self.forward = now
        after = np.linspace(self.layers, 2 * self.layers - 1, self.buckets).astype(int)
        now = now + self.pause
        for layer in range(2 * self.layers):
            if layer == self.layers:
                self.loss = now
                now = self.backward = now + work(0.3)
            now = now + slow * work((100.0 if layer < self.layers else 200.0) / self.layers)
            self.issue[:, :, layer] = now
            transfer = 0.15 * MS * (1 + 0.1 * draw.random(steps))
            tail = plant.tail_ns * draw.random(shape)
            if self.reductions:
                now = teams(self.issue[:, :, layer]) + transfer * link + tail
            self.end[:, :, layer] = now
            # Behind the layer's reduction, so that a step is over on all ranks when the last has its last bucket.
            for bucket in np.flatnonzero(after == layer):
                self.bucket_issue[:, :, bucket] = now + WOKEN_NS + (1 + bucket) * 20 * US
            now = now + self.buckets * 25 * US * (layer in after)
        self.bucket_end = np.zeros((ranks, steps, self.buckets))
        free = np.zeros(steps)
        for bucket in range(self.buckets):
            free = np.maximum(self.bucket_issue[:, :, bucket].max(axis=0), free) + 1.2 * MS
            self.bucket_end[:, :, bucket] = free + LATER_OF_ALL * plant.tail_ns * draw.random(shape)
        # A thread waits for one at a time: for buckets once it has gone on from the last reduction (`WOKEN_NS`).
        now = self.waited = np.maximum(now + WOKEN_NS, self.bucket_issue.max(axis=2) + 50 * US)
        self.done = np.maximum(now, self.bucket_end.max(axis=2)) + 50 * US
        # What a step is relative to: when the last bucket of the one before had come.
        last = self.done.max(axis=0)
        base = FIRST_NS + np.concatenate([[0.0], np.cumsum(last)[:-1]])
        self.begin = base + (self.done - last)[:, np.r_[0, : steps - 1]] * (np.arange(steps) > 0)
        self.begin = self.begin + np.roll(self.optimizer, 1, axis=1)
        for name in ("forward", "loss", "backward", "waited", "done"):
            setattr(self, name, getattr(self, name) + base)
        for name in ("issue", "end", "bucket_issue", "bucket_end"):
            setattr(self, name, getattr(self, name) + base[:, None])
        self.finish = self.done + self.optimizer

    def lasted_ms(self) -> np.ndarray:
        """Each step, [S]: from when the last rank had its last bucket of the one before."""
        done = self.done.max(axis=0)
        return np.diff(done, prepend=FIRST_NS) / MS


class Rows:
    """The rows of one rank, of which every step has as many."""

    def __init__(self, steps: int) -> None:
        self._steps, self._parts = steps, list[dict[str, Any]]()

    def add(self, kind: str, name: str, start: np.ndarray, end: np.ndarray, **columns: Any) -> None:
        """Rows of every step: `start` and `end` are [S] or [S, n]; columns are one value or [n]."""
        start, end = (np.atleast_2d(x.T).T if x.ndim == 1 else x for x in (start, end))
        count = start.shape[1]
        self._parts.append({"kind": kind, "name": name, "count": count, "start": start, "end": end, **columns})

    def _column(self, key: str, fill: Any, dtype: Any) -> np.ndarray:
        found = np.full((self._steps, sum(part["count"] for part in self._parts)), fill, dtype)
        first = 0
        for part in self._parts:
            if key in part:
                found[:, first : first + part["count"]] = part[key]
            first += part["count"]
        return found.ravel()

    def _words(self, key: str, fill: str, order: np.ndarray) -> Any:
        """Words of which each part has one."""
        import pandas as pd

        each = [part.get(key, fill) for part in self._parts]
        found = sorted({*each} - {""})
        code = {word: number for number, word in enumerate(found)} | {"": -1}
        codes = np.repeat([code[word] for word in each], [part["count"] for part in self._parts])
        return pd.Categorical.from_codes(np.tile(codes, self._steps)[order], pd.Index(found, dtype=object))

    def table(self, rank: int, plant: Plant) -> Any:
        """All of them as a table of Arrow, in order of start, on the clock of the rank's host."""
        import pandas as pd
        import pyarrow as pa

        from dsprof.schema import COLUMNS

        start = self._column("start", 0, np.float64)
        order = np.lexsort((-self._column("end", 0, np.float64), start))
        ahead, drift = plant.clock(rank // RANKS_A_HOST)
        total = len(start)

        def shown(when: np.ndarray) -> np.ndarray:
            """By the clock of the host, in whole ns: what ends where something else begins does so on it, too."""
            seen: np.ndarray = (when + ahead + (when - FIRST_NS) * drift).astype(np.int64)
            return seen

        def whole(key: str, dtype: str, missing: int = -1) -> Any:
            values = self._column(key, missing, np.int64)[order]
            return pd.array(values, "Int64").astype(dtype) if (values != missing).all() else masked(values, dtype)

        def masked(values: np.ndarray, dtype: str, missing: int = -1) -> Any:
            found = pd.array(values, "Int64")
            found[values == missing] = pd.NA
            return found.astype(dtype)

        module = self._column("module", -1, np.int64)[order]
        names = [f"blocks.{i // 16}.part{i % 16}" for i in range(int(module.max()) + 1)]
        start_ns = shown(start)[order]
        length = shown(self._column("end", 0, np.float64))[order] - start_ns
        issued = self._column("issue", -1, np.float64)
        issue_ns = np.where(issued >= 0, shown(issued), -1)[order]
        named = self._words("name", "", order)
        module_names = pd.Categorical.from_codes(module, pd.Index(names, dtype=object))
        data = {
            "rank": rank, "restart": 0, "step": np.repeat(np.arange(self._steps), total // self._steps)[order],
            "kind": self._words("kind", "", order), "lane": self._words("lane", "main", order), "thread": 7 + rank,
            "name": pd.Categorical(pd.Series(named, dtype=object).fillna(pd.Series(module_names, dtype=object))),
            "depth": self._column("depth", 0, np.int64)[order],
            "start_ns": start_ns, "dur_ns": length, "ended": True, "issue_ns": masked(issue_ns, "Int64"),
            "host_ns": masked(np.where(issue_ns >= 0, 40 * US, -1), "Int64"), "module": module_names,
            "stage": whole("stage", "Int16"), "microbatch": whole("microbatch", "Int16"),
            "purpose": self._words("purpose", "", order), "group": self._words("group", "", order),
            "seq": whole("seq", "Int32"), "peer": whole("peer", "Int32"), "tag": whole("tag", "Int32"),
            "bytes": whole("bytes", "Int64"), "value": self._column("value", np.nan, np.float64)[order],
            "grad": masked(self._column("grad", -1, np.int64)[order], "Int64").astype("boolean"),
            "source": self._words("source", "measured", order),
        }  # fmt: skip
        table = pd.DataFrame(data, index=range(total)).reindex(columns=list(COLUMNS)).astype(COLUMNS)
        return pa.Table.from_pandas(table, preserve_index=False)


def rank_rows(line: Timeline, rank: int) -> Any:
    """The rows of one rank as a table of Arrow, in order of start, on the clock of its host."""
    steps, layers, buckets, modules = line.steps, line.layers, line.buckets, line.modules
    begin, finish = line.begin[rank], line.finish[rank]
    rows = Rows(steps)
    add = rows.add
    add("step", "step", begin, finish, source="derived")
    add("phase", "data", begin, line.forward[rank], value=1.0)
    add("phase", "forward", line.forward[rank], line.loss[rank], value=line.elements[rank][:, None], grad=True)
    add("phase", "loss", line.loss[rank], line.backward[rank], source="derived")
    add("phase", "backward", line.backward[rank], line.done[rank])
    add("phase", "optimizer", line.done[rank], finish, value=1.0)
    host = rank // RANKS_A_HOST
    team, number = f"tp{host}", np.arange(2 * layers)
    issue, end = line.issue[rank], line.end[rank]
    numbered = np.arange(steps)[:, None] * (2 * layers) + number
    if line.reductions:
        add("comm", "all_reduce", issue + 5 * US, end, issue=issue, lane=f"comm.{team}", group=team, seq=numbered,
            bytes=1 << 20, purpose="tensor-parallel")  # fmt: skip
        add("wait", "all_reduce", issue + 8 * US, end + WOKEN_NS, group=team, seq=numbered)
    if line.pause[rank].all():
        add("pause", "gc", line.forward[rank], line.forward[rank] + line.pause[rank], value=2.0)
    issue, end = line.bucket_issue[rank], line.bucket_end[rank]
    numbered = np.arange(steps)[:, None] * buckets + np.arange(buckets)
    size = bucket_bytes(buckets)
    add("comm", "all_reduce", issue + 5 * US, end, issue=issue, lane="comm.0", group="0", seq=numbered, bytes=size,
        purpose="gradient")  # fmt: skip
    reached = np.maximum(np.maximum.accumulate(end, axis=1), line.waited[rank][:, None])
    from_there = np.concatenate([line.waited[rank][:, None], reached[:, :-1] + 2 * US], axis=1)
    add("wait", "all_reduce", from_there, np.maximum(reached, from_there) + US, group="0", seq=numbered)
    edges = np.concatenate([line.forward[rank][:, None], line.end[rank][:, : layers - 1]], axis=1)
    each = np.bincount(np.arange(modules) % layers, minlength=layers)
    of_layer = np.repeat(np.arange(layers), each)
    place = np.concatenate([np.arange(count) for count in each]) / np.repeat(each, each)
    low, high = edges[:, of_layer], line.issue[rank][:, :layers][:, of_layer]
    start = low + (high - low) * place
    add("module", "", start, start + (high - low) * 0.9 / np.repeat(each, each), depth=2,
        module=of_layer * 16 + np.concatenate([np.arange(count) % 16 for count in each]))  # fmt: skip
    spent = np.cumsum(finish - begin) / 1e9
    for gauge, share in (("cpu_seconds", 1.2), ("training_thread_cpu_seconds", 0.8), ("core_wait_seconds", 0.01)):
        add("gauge", gauge, finish, finish, value=(spent * share)[:, None])
    return rows.table(rank, line.plant)


def make_run(
    folder: Path,
    ranks: int,
    steps: int,
    rows: int,
    seed: int = 0,
    plant: Plant | None = None,
    missing: Iterable[int] = (),
) -> Timeline:
    """A run folder with its run.json and traces, and no captures. Of ranks that are missing there is no trace; those
    that were made already, by a call that was interrupted, stay."""
    from dsprof.run import RankInfo, RunInfo

    line = Timeline(ranks, steps, rows, seed, plant)
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    info = RunInfo(id=folder.name, name="made-up", command=["dsprof", "run", "train.py"], world_size=ranks)
    (folder / "run.json").write_text(info.to_json())
    for rank in sorted({*range(ranks)} - {*missing}):
        target = folder / "trace" / f"rank{rank:05d}.parquet"
        if target.exists():
            continue
        host, place = divmod(rank, RANKS_A_HOST)
        about = RankInfo(rank, 0, f"host{host}", 100 + rank, "", True, steps - 1, steps * rows, 0, 0, 0, True)
        team = list(range(host * RANKS_A_HOST, min((host + 1) * RANKS_A_HOST, ranks)))
        facts = [
            {"fact": "process", "rank": rank, "script": "train.py", "cpus": [2 * place, 2 * place + 1], "threads": 1},
            {"fact": "ddp", "rank": rank, "bucket_cap_mb": 1, "site": "train.py:10",
             "gradient_bytes": bucket_bytes(line.buckets).tolist()},
            {"fact": "group", "rank": rank, "name": "0", "ranks": list(range(ranks)), "desc": "default_pg"},
            {"fact": "group", "rank": rank, "name": f"tp{host}", "ranks": team, "desc": "tp"},
        ]  # fmt: skip
        write_rank(target, rank_rows(line, rank), about, facts, ranks)
    return line


def write_rank(target: Path, table: Any, about: RankInfo, facts: list[dict[str, Any]], ranks: int) -> None:
    """A rank's trace of so many ranks, with what it tells of itself."""
    import pyarrow.parquet as pq

    from dsprof.trace.group_facts import pack

    summary = {"ranks": [vars(about)], "facts": pack(facts), "versions": {}, "world_size": ranks, "problems": [],
               "errors": [], "cuda": False}  # fmt: skip
    metadata = {**(table.schema.metadata or {}), b"dsprof.rank": json.dumps(summary).encode()}
    begun = target.with_suffix(".part")
    pq.write_table(table.replace_schema_metadata(metadata), begun, compression="zstd")
    begun.replace(target)
