"""How long the analysis of a run takes, and how much memory, from its Parquet files to the verdict.

    python benchmarks/analysis.py                          # the cases of the result file, about ten minutes
    python benchmarks/analysis.py --ranks 64 --steps 100 --rows 500
    python benchmarks/analysis.py --plot                   # only draws benchmarks/results/analysis.svg anew
    python benchmarks/analysis.py --hta PYTHON             # importing torch.profiler traces beside HTA (beside_hta.py)

The runs are made up, one Parquet file a rank beside a run.json, as `dsprof run` leaves them: eight ranks a host, whose
clocks are apart and drift; the ranks of a host reduce activations with one another in every layer (of a run of at least
eight), and all reduce their gradients in buckets, which they wait for by name. One rank is slower than the others. Each
is analyzed in a fresh process, at most two threads wide. A case that the result file holds is not measured again
without --force.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "analysis.json"
IMPORT_RESULTS = HERE / "results" / "import.json"
PLOT = HERE / "results" / "analysis.svg"
CASES = [(2, 100, 500), (8, 100, 500), (64, 100, 500), (64, 100, 100), (8, 20, 500), (32, 20, 500), (128, 20, 500),
         (512, 20, 500)]  # fmt: skip
"""(ranks, steps, rows a step): the sizes that are asked for, then those of the plot."""
PLOTTED = (20, 500)
"""Steps and rows a step of the cases that are plotted over the number of ranks."""

RANKS_A_HOST = 8
US, MS = 1_000, 1_000_000
FIXED = 9
"""Rows of a step that are neither modules nor communication: a step, five phases, three gauges."""
DRIFT_PPM = 5.0

STAGES = {
    "align": ["align"],
    "match": ["match_collectives", "mismatches"],
    "ranks": ["summarize_ranks"],
    "budget": ["step_budget", "waits_table", "divide_time"],
    "irregular": ["find_irregular", "mark_ordinary", "lasting_change"],
    "load of cores": ["Gauges", "measure_load"],
    "graph": ["build_graph"],
    "replay": ["check"],
    "rules": ["judge"],
}
"""Stage -> functions of `analyzer.analyze`. `align` and `ranks` read the files. Before them `load` brings the run up to
date."""


# --- a made-up run --------------------------------------------------------------------------------


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


class Timeline:
    """When what happens, [R, S, ...] in ns on one clock: every rank's work is drawn, the rest follows from it."""

    def __init__(self, ranks: int, steps: int, rows: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.ranks, self.steps = ranks, steps
        self.layers, self.buckets, self.modules, self.reductions = layout(ranks, rows)
        shape = (ranks, steps)
        slow = np.where(np.arange(ranks) == ranks // 2, 1.15, 1.0)[:, None]

        def work(ms: float, share: float = 0.02) -> np.ndarray:
            return ms * MS * np.maximum(1 + share * draw.standard_normal(shape), 0.2)

        def teams(when: np.ndarray) -> np.ndarray:
            """The last of each host's ranks."""
            first = np.arange(0, ranks, RANKS_A_HOST)
            return np.repeat(np.maximum.reduceat(when, first), RANKS_A_HOST, axis=0)[:ranks]

        self.optimizer = work(5.0)
        self.data = work(2.0, 0.2)
        self.issue = np.zeros((*shape, 2 * self.layers))
        self.end = np.zeros_like(self.issue)
        self.bucket_issue = np.zeros((*shape, self.buckets))
        now = self.optimizer * 0.0 + np.roll(self.optimizer, 1, axis=1) + self.data
        self.forward = now
        after = np.linspace(self.layers, 2 * self.layers - 1, self.buckets).astype(int)
        for layer in range(2 * self.layers):
            if layer == self.layers:
                self.loss = now
                now = self.backward = now + work(0.3)
            now = now + slow * work((100.0 if layer < self.layers else 200.0) / self.layers)
            for bucket in np.flatnonzero(after == layer):
                self.bucket_issue[:, :, bucket] = now + bucket * 20 * US
            self.issue[:, :, layer] = now + self.buckets * 25 * US * (layer in after)
            transfer = 0.15 * MS * (1 + 0.1 * draw.random(steps))
            tail = 20 * US * draw.random(shape)
            if self.reductions:
                now = teams(self.issue[:, :, layer]) + transfer + tail
            self.end[:, :, layer] = now
        self.bucket_end = np.zeros((ranks, steps, self.buckets))
        free = np.zeros(steps)
        for bucket in range(self.buckets):
            free = np.maximum(self.bucket_issue[:, :, bucket].max(axis=0), free) + 1.2 * MS
            self.bucket_end[:, :, bucket] = free + 30 * US * draw.random(shape)
        now = self.waited = np.maximum(now, self.bucket_issue.max(axis=2) + 50 * US)
        self.done = np.maximum(now, self.bucket_end.max(axis=2)) + 50 * US
        # What a step is relative to: when the last bucket of the one before had come.
        last = self.done.max(axis=0)
        base = 10e9 + np.concatenate([[0.0], np.cumsum(last)[:-1]])
        self.begin = base + (self.done - last)[:, np.r_[0, : steps - 1]] * (np.arange(steps) > 0)
        self.begin = self.begin + np.roll(self.optimizer, 1, axis=1)
        for name in ("forward", "loss", "backward", "waited", "done"):
            setattr(self, name, getattr(self, name) + base)
        for name in ("issue", "end", "bucket_issue", "bucket_end"):
            setattr(self, name, getattr(self, name) + base[:, None])
        self.finish = self.done + self.optimizer


def rank_rows(line: Timeline, rank: int) -> Any:
    """The rows of one rank as a table of Arrow, in order of start, on the clock of its host."""
    import pandas as pd
    import pyarrow as pa

    from dsprof.schema import COLUMNS

    steps, layers, buckets, modules = line.steps, line.layers, line.buckets, line.modules
    begin, finish = line.begin[rank], line.finish[rank]
    parts: list[dict[str, Any]] = []

    def add(kind: str, name: str, start: np.ndarray, end: np.ndarray, **columns: Any) -> None:
        """Rows of every step: `start` and `end` are [S] or [S, n]; columns are one value or [n]."""
        start, end = (np.atleast_2d(x.T).T if x.ndim == 1 else x for x in (start, end))
        count = start.shape[1]
        filled = {key: np.broadcast_to(np.asarray(value), start.shape) for key, value in columns.items()}
        parts.append({"kind": kind, "name": name, "count": count, "start": start, "end": end, **filled})

    add("step", "step", begin, finish, source="derived")
    add("phase", "data", begin, line.forward[rank], value=1.0)
    add("phase", "forward", line.forward[rank], line.loss[rank], value=4096.0, grad=True)
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
        add("wait", "all_reduce", issue + 8 * US, end + 4 * US, group=team, seq=numbered)
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

    def column(key: str, fill: Any, dtype: Any) -> np.ndarray:
        missing = [np.full((steps, part["count"]), fill, dtype) for part in parts]
        found = [part.get(key, empty) for part, empty in zip(parts, missing, strict=True)]
        return np.concatenate(found, axis=1).astype(dtype).ravel()

    start = column("start", 0, np.float64)
    order = np.lexsort((-column("end", 0, np.float64), start))
    offset = host * 3_600_000_000_000 + (start - 10e9) * (DRIFT_PPM * 1e-6 * host)
    total = len(start)

    def whole(key: str, dtype: str, missing: int = -1) -> Any:
        values = column(key, missing, np.int64)[order]
        return pd.array(values, "Int64").astype(dtype) if (values != missing).all() else masked(values, missing, dtype)

    def masked(values: np.ndarray, missing: int, dtype: str) -> Any:
        found = pd.array(values, "Int64")
        found[values == missing] = pd.NA
        return found.astype(dtype)

    def words(key: str, fill: str) -> Any:
        values = np.concatenate(
            [np.broadcast_to(np.asarray(part.get(key, fill), dtype="U40"), (steps, part["count"])) for part in parts], 1
        ).ravel()[order]
        found, codes = np.unique(values, return_inverse=True)
        codes = codes - (found[0] == "")
        return pd.Categorical.from_codes(codes, pd.Index(found[found != ""], dtype=object))

    module = column("module", -1, np.int64)[order]
    names = [f"blocks.{i // 16}.part{i % 16}" for i in range(int(module.max()) + 1)]
    start_ns = (start + offset)[order].astype(np.int64)
    length = (column("end", 0, np.float64) - start)[order].astype(np.int64)
    issued = column("issue", -1, np.float64)
    issue_ns = np.where(issued >= 0, issued + offset, -1)[order].astype(np.int64)
    named = words("name", "")
    module_names = pd.Categorical.from_codes(module, pd.Index(names, dtype=object))
    data = {
        "rank": rank, "restart": 0, "step": np.repeat(np.arange(steps), total // steps)[order],
        "kind": words("kind", ""), "lane": words("lane", "main"), "thread": 7 + rank,
        "name": pd.Categorical(pd.Series(named, dtype=object).fillna(pd.Series(module_names, dtype=object))),
        "depth": column("depth", 0, np.int64)[order],
        "start_ns": start_ns, "dur_ns": length, "ended": True, "issue_ns": masked(issue_ns, -1, "Int64"),
        "host_ns": masked(np.where(issue_ns >= 0, 40 * US, -1), -1, "Int64"), "module": module_names,
        "purpose": words("purpose", ""), "group": words("group", ""), "seq": whole("seq", "Int32"),
        "bytes": whole("bytes", "Int64"), "value": column("value", np.nan, np.float64)[order],
        "grad": masked(column("grad", -1, np.int64)[order], -1, "Int64").astype("boolean"),
        "source": words("source", "measured"),
    }  # fmt: skip
    table = pd.DataFrame(data, index=range(total)).reindex(columns=list(COLUMNS)).astype(COLUMNS)
    return pa.Table.from_pandas(table, preserve_index=False)


def make_run(folder: Path, ranks: int, steps: int, rows: int) -> None:
    """A run folder with its run.json and traces, and no captures."""
    import pyarrow.parquet as pq

    from dsprof.run import RankInfo, RunInfo

    line = Timeline(ranks, steps, rows)
    (folder / "trace").mkdir(parents=True)
    info = RunInfo(id=folder.name, name="made-up", command=["dsprof", "run", "train.py"], world_size=ranks)
    (folder / "run.json").write_text(info.to_json())
    for rank in range(ranks):
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
        summary = {"ranks": [vars(about)], "facts": facts, "versions": {}, "world_size": ranks, "problems": [],
                   "errors": [], "cuda": False}  # fmt: skip
        table = rank_rows(line, rank)
        metadata = {**(table.schema.metadata or {}), b"dsprof.rank": json.dumps(summary).encode()}
        target = folder / "trace" / f"rank{rank:05d}.parquet"
        pq.write_table(table.replace_schema_metadata(metadata), target, compression="zstd")


# --- measuring ------------------------------------------------------------------------------------


def peak_mb() -> float:
    """Peak resident set of this process, MB. Not `getrusage`: a child begins with its parent's there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def analyze_and_tell(folder: Path) -> None:
    """Runs in the fresh process: prints a JSON object."""
    from dsprof import trace
    from dsprof.analyzer import analyze
    from dsprof.run import RunFolder

    analyzer = sys.modules[analyze.__module__]

    before = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    spent: dict[str, float] = dict.fromkeys(["load", *STAGES], 0.0)
    peaks: dict[str, float] = {}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += time.process_time() - begun
                peaks[stage] = round(peak_mb())

        return call

    for stage, names in STAGES.items():
        for name in names:
            setattr(analyzer, name, timed(stage, getattr(analyzer, name)))
    loaded = timed("load", trace.load)(RunFolder(folder))
    result = analyze(loaded)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        json.dumps(
            {
                "rows": sum(len(loaded.read(rank, ("rank",))) for rank in loaded.ranks),
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "peak_mb": round(peak_mb()),
                "imports_mb": round(before),
                "stages_cpu_s": {stage: round(took, 2) for stage, took in spent.items()}
                | {"rest": round(cpu - sum(spent.values()), 2)},
                "peak_after_mb": peaks,
                "verdict": result.verdict.headline,
                "not_judged": result.not_judged,
                "clock_error_us": round(result.capture.clock_error_us, 1),
            }
        )
    )


def measure(ranks: int, steps: int, rows: int, keep: Path | None) -> dict[str, Any]:
    folder = (keep or Path(tempfile.mkdtemp())) / f"made-up-{ranks}x{steps}x{rows}"
    try:
        if not (folder / "run.json").exists():
            begun = time.perf_counter()
            make_run(folder, ranks, steps, rows)
            print(f"{folder.name}: made in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        child = subprocess.run(
            [sys.executable, __file__, "--child", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "2",
                "OPENBLAS_NUM_THREADS": "2",
                "ARROW_DEFAULT_MEMORY_POOL": "system",
            },
        )
    finally:
        if keep is None:
            shutil.rmtree(folder.parent)
    found: dict[str, Any] = json.loads(child.stdout)
    return {"ranks": ranks, "steps": steps, "rows_a_step": rows, **found}


def draw(cases: list[dict[str, Any]], file: Path) -> None:
    """CPU seconds and memory over the number of ranks, both axes logarithmic, beside a line through the first that is
    proportional to the ranks."""
    chosen = sorted(
        (case for case in cases if (case["steps"], case["rows_a_step"]) == PLOTTED), key=lambda case: int(case["ranks"])
    )
    if len(chosen) < 2:
        return
    width, height, left, top = 380, 260, 60, 40
    low, high = chosen[0]["ranks"], chosen[-1]["ranks"]
    text = []
    for panel, (title, value) in enumerate(
        (
            ("CPU seconds, Parquet to verdict", lambda case: case["cpu_s"]),
            ("peak memory above the imports, MB", lambda case: case["peak_mb"] - case["imports_mb"]),
        )
    ):
        values = [max(float(value(case)), 1e-2) for case in chosen]
        bottom, ceiling = 10 ** np.floor(np.log10(min(values))), 10 ** np.ceil(np.log10(max(values)))
        shift = panel * (width + 140) + left

        def at(
            ranks: float, amount: float, shift: int = shift, lowest: float = bottom, highest: float = ceiling
        ) -> str:
            x = shift + width * np.log(ranks / low) / np.log(high / low)
            y = top + height * (1 - np.log(amount / lowest) / np.log(highest / lowest))
            return f"{x:.1f},{y:.1f}"

        def x_y(place: str) -> str:
            return 'x="{}" y="{}"'.format(*place.split(","))

        text.append(f'<text x="{shift}" y="{top - 16}" font-weight="bold">{title}</text>')
        for power in range(round(np.log10(bottom)), round(np.log10(ceiling)) + 1):
            line = f"{at(low, 10.0**power)} {at(high, 10.0**power)}"
            text.append(f'<polyline points="{line}" stroke="#ddd"/>')
            text.append(f'<text {x_y(at(low, 10.0**power))} dx="-8" dy="4" text-anchor="end">{10.0**power:g}</text>')
        for case in chosen:
            place = at(case["ranks"], bottom)
            text.append(f'<text {x_y(place)} dy="18" text-anchor="middle">{case["ranks"]}</text>')
        straight = [values[-1] * case["ranks"] / high for case in chosen]
        points = [at(case["ranks"], amount) for case, amount in zip(chosen, straight, strict=True) if amount >= bottom]
        text.append(f'<polyline points="{" ".join(points)}" stroke="#999" stroke-dasharray="4 4"/>')
        points = [at(case["ranks"], amount) for case, amount in zip(chosen, values, strict=True)]
        text.append(f'<polyline points="{" ".join(points)}" stroke="#2a6f97" stroke-width="2"/>')
        text += ['<circle cx="{}" cy="{}" r="3.5" fill="#2a6f97"/>'.format(*point.split(",")) for point in points]
        text += [
            f'<text {x_y(point)} dx="6" dy="16">{f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"}</text>'
            for point, amount in zip(points, values, strict=True)
        ]
    steps, rows = PLOTTED
    foot = f"ranks, of {steps} steps of {rows} rows each; dashed: proportional to the ranks"
    whole, tall = 2 * (width + 140), height + top + 60
    text.append(f'<text x="{whole / 2}" y="{tall - 12}" text-anchor="middle">{foot}</text>')
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{tall}" fill="none" font-size="12" '
        'font-family="sans-serif">\n<style>text {fill: #333}</style>\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(text)
        + "\n</svg>\n"
    )


def compare_with_hta(python: Path, times: int) -> int:
    import beside_hta

    found = {
        "what": "traces of torch.profiler: to HTA's breakdown, overlap and idle time, and to dsprof's verdict",
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        **beside_hta.measure(python, times),
    }
    IMPORT_RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", help="numbers of ranks, such as 8,64,512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=500, help="rows a step and rank")
    parser.add_argument("--keep", type=Path, help="a folder to keep the made-up runs in, and to find them in")
    parser.add_argument("--force", action="store_true", help="measure again what the result file holds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--hta", type=Path, metavar="PYTHON", help="an interpreter that has HTA (pip: traceinsight)")
    parser.add_argument("--times", type=int, default=160, help="with --hta: how often each trace's step is repeated")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        analyze_and_tell(args.child)
        return 0
    if args.hta:
        return compare_with_hta(args.hta, args.times)
    cases = [(int(ranks), args.steps, args.rows) for ranks in args.ranks.split(",")] if args.ranks else CASES
    known = json.loads(args.output.read_text())["cases"] if args.output.exists() else []
    for case in [] if args.plot else cases:
        kept = [item for item in known if (item["ranks"], item["steps"], item["rows_a_step"]) != case]
        if len(kept) < len(known) and not args.force:
            continue
        found = measure(*case, args.keep)
        known = sorted([*kept, found], key=lambda item: (item["rows_a_step"], item["steps"], item["ranks"]))
        result = {
            "what": "from the Parquet files of a made-up run to the verdict, in a fresh process",
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "cases": known,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(found, indent=1))
    draw(known, args.output.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
