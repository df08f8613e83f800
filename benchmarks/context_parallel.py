"""What does zigzag save ranks that share causal sequences in contiguous pieces, and is that predicted?

    python benchmarks/context_parallel.py              # writes benchmarks/results/context_parallel.json
    python benchmarks/context_parallel.py --only "2 ranks, asleep"

Each case is a job of the engine with ring attention under `dsprof run`. The first run is in contiguous pieces, and what
`data.imbalance` says that its fix saves is written to the results before anything else runs. Then the fix's own
setting, `--set context_parallel.order=zigzag`, and contiguous pieces take turns. The saving is the median of the turns,
of whose runs the median step counts, after WARM_UP; `load` is how many threads wanted a core after each run.

Attention is torch's on two ranks of a thread each, or sleeps for as long as a rank has pairs of a query and a key, so
that four ranks do not want two cores. Results are written after each run, and a benchmark that was broken off goes on
where it was. Of attention without a mask, and of zigzag, nothing is to be said: `data.imbalance` above info is counted.

"2 ranks, computed" was run four times. At first 13 and 16 threads wanted the two cores, and both runs were called a
slow rank: what the first rank took longer for then counted against the order, and does no longer. The next, at such
loads too, told little: turns saved -191 to 478 ms where 191 [106, 276] was predicted. The third and the fourth, which
is in the results, ran with nothing beside them, and their turns still differ by more than the interval is wide: what
two ranks and their threads of gloo do to each other on two cores is as large as the saving. So each order's attention
is also counted alone, in the CPU time of one thread (`attention_alone`): what the slowest rank of contiguous pieces
takes longer than that of zigzag, in all layers, forward and backward, is what there is to be saved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402
from dsprof.engine.sequence import ring  # noqa: E402
from dsprof.engine.sequence.layout import divide  # noqa: E402

RESULTS: Final = HERE / "results" / "context_parallel.json"
JOB: Final = HERE / "prediction_jobs" / "context_parallel.py"
WARM_UP: Final = 6
"""Steps that do not count."""
KEY: Final = "context_parallel.order"
CODE: Final = "data.imbalance"
CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """arguments: of the job; causal: zigzag saves something."""

    ranks: int
    arguments: tuple[str, ...]
    causal: bool = True

    @property
    def asleep(self) -> bool:
        return any(argument.startswith("--asleep") for argument in self.arguments)


CASES: Final[Mapping[str, Case]] = {
    "4 ranks, asleep": Case(4, ("--asleep-ms=320", "--mlp-ms=20", "--steps=20")),
    "2 ranks, asleep": Case(2, ("--asleep-ms=160", "--mlp-ms=20", "--steps=24")),
    "2 ranks, computed": Case(2, ("--length=2048", "--width=128", "--steps=24")),
    "4 ranks, asleep, no mask": Case(4, ("--asleep-ms=160", "--mlp-ms=20", "--steps=20", "--full"), causal=False),
    "2 ranks, asleep, no mask": Case(2, ("--asleep-ms=80", "--mlp-ms=20", "--steps=24", "--full"), causal=False),
}


def run(case: Case, settings: Sequence[str]) -> tuple[Record, Mapping[str, Any]]:
    """The median step, ms, and what dsprof found."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        config = folder / "ds.json"
        config.write_text(json.dumps({
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "sequence_parallel_size": case.ranks,
            "context_parallel": {"attention": "ring", "order": CONTIGUOUS, "check": not case.asleep},
        }))  # fmt: skip
        finished = profile(
            folder, JOB, *case.arguments, "--deepspeed_config", str(config), "--log", str(folder / "steps.json"),
            ranks=case.ranks, flags=("-q", "--no-report", *settings), variables={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if finished.status:
            sys.exit(f"{case}: exit status {finished.status}\n{finished.stderr[-4000:]}")
        at, found = json.loads((folder / "steps.json").read_text()), finished.findings
    steps = [1e3 * (later - earlier) for earlier, later in zip(at[WARM_UP:], at[WARM_UP + 1 :], strict=False)]
    said = [one["code"] for one in found["findings"] if one["severity"] != "info"]
    return {"step_ms": round(statistics.median(steps), 1), "said": said, "load": round(os.getloadavg()[0], 1)}, found


def attention_alone(case: Case, repeats: int = 15) -> Record:
    """What each rank's attention takes a step, ms of CPU time of this thread, in both orders."""
    sizes = dict(argument.removeprefix("--").split("=") for argument in case.arguments)
    length, heads, layers = int(sizes["length"]), int(sizes["width"]) // 32, int(sizes.get("layers", 2))
    torch.set_num_threads(1)
    found: Record = {}
    for order in (CONTIGUOUS, ZIGZAG):
        layout = divide(length, case.ranks, zigzag=order == ZIGZAG)
        parts = [
            [ring.part_of(layout, rank, source, True) for source in range(case.ranks)] for rank in range(case.ranks)
        ]
        whole = torch.randn(1, heads, length // case.ranks, 32)
        found[order] = [
            round(layers * sum(_block_ms(whole, part, repeats) for part in of_rank if part is not None), 1)
            for of_rank in parts
        ]
    return {**found, "saving_ms": round(max(found[CONTIGUOUS]) - max(found[ZIGZAG]), 1)}


def _block_ms(whole: torch.Tensor, part: ring.Part, repeats: int) -> float:
    """The attention of some queries to some keys, forward and backward: the median."""
    rows, columns, causal = part
    query, key, scale, took = whole[:, :, rows], whole[:, :, columns], whole.shape[3] ** -0.5, []
    for _ in range(repeats):
        before = time.thread_time()
        out, lse = ring.attend_block(query, key, key, causal, scale)
        ring.block_gradients(out, query, key, key, out, lse, causal, scale)
        took.append(1e3 * (time.thread_time() - before))
    return statistics.median(took)


def predicted(findings: Mapping[str, Any]) -> Record | None:
    """What the finding says that its fix saves."""
    for one in findings["findings"]:
        for fix in one["fixes"]:
            if one["code"] == CODE and KEY in fix["set"]:
                gain = {name: round(fix["gain"][name], 1) for name in ("ms", "low", "high")}
                return {"says": one["title"], "set": {KEY: fix["set"][KEY]}, **gain}
    return None


def judged(runs: Mapping[str, Sequence[Record]], told: Mapping[str, Any]) -> Record:
    """Predicted beside measured."""
    before, after = ([one["step_ms"] for one in runs[order]] for order in (CONTIGUOUS, ZIGZAG))
    saved = [one - other for one, other in zip(before, after, strict=False)]
    if not saved:
        return {}
    saving = statistics.median(saved)
    return {
        "saved_ms": [round(each, 1) for each in saved], "saving_ms": round(saving, 1),
        "saving_percent": round(100 * saving / statistics.median(before), 1),
        "error_percent_of_step": round(100 * (told["ms"] - saving) / statistics.median(before), 1),
        "holds": told["low"] <= saving <= told["high"],
        "turns_that_hold": sum(told["low"] <= each <= told["high"] for each in saved),
    }  # fmt: skip


def summary(cases: Mapping[str, Record]) -> Record:
    priced = [one for one in cases.values() if "holds" in one]
    silent = [run for one in cases.values() for run in one["runs"][ZIGZAG]]
    silent += [run for name, one in cases.items() if not CASES[name].causal for run in one["runs"][CONTIGUOUS]]
    return {
        "priced": len(priced), "hold": sum(one["holds"] for one in priced),
        "runs_without_it": len(silent), "accused_there": sum(CODE in run["said"] for run in silent),
    }  # fmt: skip


def write(path: Path, cases: Mapping[str, Record]) -> None:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    whole = {"what": (__doc__ or "").partition("\n")[0], "machine": machine, "summary": summary(cases), "cases": cases}
    write_atomically(path, (json.dumps(whole, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a case")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    cases: dict[str, Record] = json.loads(args.output.read_text())["cases"] if args.output.exists() else {}
    for name, case in CASES.items():
        if args.only not in (None, name):
            continue
        done = cases.setdefault(name, {"ranks": case.ranks, "job": " ".join(case.arguments), "predicted": None,
                                       "runs": {CONTIGUOUS: [], ZIGZAG: []}})  # fmt: skip
        runs = done["runs"]
        for turn in range(args.turns):
            for order in (CONTIGUOUS, ZIGZAG) if case.causal else (CONTIGUOUS,):
                if len(runs[order]) > turn:
                    continue
                told = done["predicted"]
                if order == ZIGZAG and told is None:
                    sys.exit(f"{name}: {CODE} names no {KEY}; said: {runs[CONTIGUOUS]}")
                settings = ("--set", f"{KEY}={told['set'][KEY]}") if order == ZIGZAG else ()
                found, findings = run(case, settings)
                runs[order].append(found)
                if not turn and order == CONTIGUOUS:
                    done["predicted"] = predicted(findings)
                done |= judged(runs, done["predicted"]) if done["predicted"] else {}
                write(args.output, cases)
                print(name, order, json.dumps(found), flush=True)
        if case.causal and not case.asleep and "attention_alone" not in done:
            done["attention_alone"] = attention_alone(case)
            write(args.output, cases)
        print(name, json.dumps(done, indent=1), flush=True)


if __name__ == "__main__":
    main()
