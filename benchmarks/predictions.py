"""Predicted against measured: what dsprof says that mending each planted fault saves, and what it does save.

    python benchmarks/predictions.py                     # four hours; writes benchmarks/results/predictions.json
    python benchmarks/predictions.py --only c01 --alternations 1 --work /tmp/try --output /tmp/try.json
    python benchmarks/predictions.py --predict-again     # no job is run: the kept captures, today's analyzer

A hundred pairs (`prediction_pairs.py`) of a job with one fault planted and the same job with it mended. Planted and
mended runs alternate (A B A B ...), five times, so that drift of the host falls on both.

A prediction is the gain (ms, low, high) of the planted run's own finding of that code, made without having seen a
mended run. What it is held against is the saving of the pair: the median over the alternations of the planted run's
mean step less the mended run's that came right after it. That is the mean of ordinary steps, as findings.json has it
(`run.step_ms.mean`); of faults outside of ordinary steps (checkpoint.stall, eval.uneven, workers started anew), whose
gain is divided over all steps, it is the wall time of all steps after warm-up, the first quarter, by their number, as
rank 0 of the job saw it itself. `measured_by_wall_ms` is the latter for every pair. Where the fix is a larger batch in
more micro-batches, the mended step is divided by how many planted ones it stands for.

A pair is judged by the prediction of its first planted run; those of all its planted runs are kept, too:
  holds            low <= saving <= high
  error_percent    of the saving: |predicted - saving| / saving; 100 where nothing was predicted
  width_to_saving  (high - low) / saving; None, which counts as the widest, where nothing was predicted
  gain_percent     the saving, of the planted step
  saving_interval_ms  how sure the measurement itself is: Student's 95 % interval of the mean of the differences

The host has to be quiet, above all for real compute: what others on it take of its cores while a run lasts is measured
(`others_cores`). A run waits for them to take less than --quiet, for five minutes at most, and is made again, twice at
most, if they took more meanwhile, whatever its result; the quietest is kept.

Results are written after each pair. Runs are kept in the work folder, and what is complete there is not run again.
What a real layer computes for a millisecond is measured once for a work folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
JOBS = HERE / "prediction_jobs"
for folder in (ROOT, HERE, JOBS):
    sys.path.insert(0, str(folder))

from common import multiply  # noqa: E402
from prediction_pair import Pair  # noqa: E402
from prediction_pairs import PAIRS  # noqa: E402
from prediction_verdict import Run, came_true, judge, problems, said_by, summary  # noqa: E402

ABORTED: Final = "terminate called without an active exception"
"""Of torch: a gloo job says this on its way out now and then, with any profiler or none. It is run again."""
ATTEMPTS: Final = 3
TIMEOUT_S: Final = 300
LOOK_S, PATIENCE_S = 2.0, 300.0
"""How long is looked whether the host is quiet, and how long is waited for that before a run."""


class Failed(Exception):
    """A job did not end as it should."""


# --- runs ------------------------------------------------------------------------------------------


class Work:
    """The folder that keeps every run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_pair(self, pair: Pair) -> Path:
        return self.folder / re.sub(r"\W+", "-", pair.name)

    def of_run(self, pair: Pair, number: int, what: str) -> Path:
        return self.of_pair(pair) / f"{number}-{what}"

    def per_ms(self) -> float:
        """Products of matrices that take a millisecond on an idle core: measured once."""
        file = self.folder / "per_ms.json"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(calibrate()))
        return float(json.loads(file.read_text()))

    def read(self, pair: Pair, number: int, what: str, args: Sequence[str]) -> Run | None:
        """A run that is complete and was of this job; else None."""
        folder = self.of_run(pair, number, what)
        try:
            if json.loads((folder / "job.json").read_text()) != described(pair, args):
                return None
            found = json.loads((folder / "run" / "findings.json").read_text())
            others = float(json.loads((folder / "others.json").read_text()))
            return Run(found, json.loads((folder / "steps.json").read_text()), others)
        except FileNotFoundError:
            return None

    def runs(self, pair: Pair, alternations: int) -> tuple[list[Run], list[Run], dict[str, str]] | None:
        """Planted and mended runs, and what the fix named that the mended ones ran with; None if not complete."""
        said = self.said(pair)
        if said is None:
            return None
        planted = [self.read(pair, n, "planted", pair.planted_args()) for n in range(alternations)]
        mended = [self.read(pair, n, "mended", pair.mended_args(said)) for n in range(alternations)]
        complete = [run for run in (*planted, *mended) if run is not None]
        if len(complete) < 2 * alternations:
            return None
        return complete[:alternations], complete[alternations:], said

    def said(self, pair: Pair) -> dict[str, str] | None:
        """What the fix of the first planted run named of the values that the mended job asks for."""
        file = self.of_pair(pair) / "fix.json"
        return json.loads(file.read_text()) if file.exists() else None

    def keep_said(self, pair: Pair, run: Run) -> dict[str, str]:
        asked = re.findall(r"{(\w+)}", pair.mended)
        said = {name: value for name, value in said_by(run.finding(pair.fault)).items() if name in asked}
        (self.of_pair(pair) / "fix.json").write_text(json.dumps(said))
        return said


def calibrate(of: int = 25) -> float:
    torch.set_num_threads(1)
    took = []
    for _ in range(of):
        began = time.perf_counter()
        multiply(200)
        took.append(time.perf_counter() - began)
    return round(200 / (1e3 * sorted(took)[of // 2]), 2)


def described(pair: Pair, args: Sequence[str]) -> dict[str, Any]:
    return {"script": pair.script, "args": list(args), "ranks": pair.ranks, "real": pair.real}


class Host:
    """How many cores other processes take, from one moment on."""

    def __init__(self) -> None:
        self.began_s, self.busy_s, self.own_s = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in own)

    def others_cores(self) -> float:
        now_s, busy_s, own_s = self._now()
        return max((busy_s - self.busy_s) - (own_s - self.own_s), 0.0) / (now_s - self.began_s)


def wait_for_quiet(quiet: float) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        host = Host()
        time.sleep(LOOK_S)
        if host.others_cores() <= quiet:
            return


def run_job(work: Work, pair: Pair, number: int, what: str, args: Sequence[str], quiet: float) -> Run:
    """Run it under `dsprof run`, unless it was. Raises Failed."""
    done = work.read(pair, number, what, args)
    if done is not None:
        return done
    folder = work.of_run(pair, number, what)
    least: float | None = None
    for attempt in range(ATTEMPTS):
        wait_for_quiet(quiet)
        tried = folder.with_name(f"{folder.name}-tried")
        others = try_job(work, pair, tried, args)
        if least is None or others < least:
            least = others
            shutil.rmtree(folder, ignore_errors=True)
            tried.rename(folder)
        shutil.rmtree(tried, ignore_errors=True)
        if others <= quiet:
            break
        print(f"  {pair.name}, {what} {number}: others took {others:.2f} cores, {attempt + 1}", flush=True)
    done = work.read(pair, number, what, args)
    if done is None:
        raise Failed(f"{folder}: no findings.json or no steps.json in it")
    return done


def try_job(work: Work, pair: Pair, folder: Path, args: Sequence[str]) -> float:
    """Run it in `folder`; the cores that others took meanwhile. Raises Failed."""
    drop = ("DSPROF", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PET_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PREDICTION_JOBS_PER_MS": str(work.per_ms() if pair.real else 0),
    }
    command = [sys.executable, "-m", "dsprof", "run", "-q", "--no-report", "-o", str(folder / "run")]
    command += [
        "--nproc-per-node",
        str(pair.ranks),
        str(JOBS / pair.script),
        *args,
        "--log",
        str(folder / "steps.json"),
    ]
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        host = Host()
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        others = round(host.others_cores(), 3)
        if ABORTED not in ended.stderr:
            break
    if ended.returncode:
        raise Failed(f"{' '.join(command)}: exit status {ended.returncode}\n{ended.stderr[-4000:]}")
    (folder / "others.json").write_text(json.dumps(others))
    (folder / "job.json").write_text(json.dumps(described(pair, args)))
    return others


def run_pair(work: Work, pair: Pair, alternations: int, quiet: float) -> None:
    for number in range(alternations):
        planted = run_job(work, pair, number, "planted", pair.planted_args(), quiet)
        said = work.said(pair)
        if said is None:
            said = work.keep_said(pair, planted)
        run_job(work, pair, number, "mended", pair.mended_args(said), quiet)


def predict_again(folder: Path) -> None:
    """Write a run's findings.json anew."""
    from dsprof import reports
    from dsprof.run import RunFolder

    reports.finish(RunFolder(folder), report=False)


# --- results ---------------------------------------------------------------------------------------


def result_of(records: dict[str, Any], per_ms: float | None) -> dict[str, Any]:
    ordered = {pair.name: records[pair.name] for pair in PAIRS if pair.name in records}
    sets = {name: [of for of in ordered.values() if of["set"] == name] for name in ("calibration", "fresh")}
    return {
        "what": "gain predicted from one run against the difference to a run without the fault, in alternation",
        "machine": {
            "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
            "products_a_ms": per_ms,
        },
        "summary": {name: summary(of) for name, of in sets.items()},
        "came_true": {name: came_true(of) for name, of in sets.items()},
        "pairs": ordered,
    }  # fmt: skip


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


def line(name: str, record: dict[str, Any]) -> str:
    first = record["predicted"][0]
    said = f"{first['ms']:6.1f} [{first['low']:6.1f}, {first['high']:6.1f}]" if first else "nothing"
    error = "  -" if record["error_percent"] is None else f"{record['error_percent']:3.0f}"
    return (
        f"{name:34s} {record['compute']:8s} step {record['step_ms']:6.1f} ms  predicted {said:26s} saved "
        f"{record['saving_ms']:6.1f} ({record['gain_percent']:3.0f} %)  error {error} %  "
        f"{'holds' if record['holds'] else 'no   '}  {', '.join(problems(record))}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dsprof-predictions")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "predictions.json")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--only", metavar="REGEX", default="", help="pairs whose name matches")
    parser.add_argument("--set", choices=["calibration", "fresh"], help="one of the two sets")
    parser.add_argument(
        "--quiet", type=float, default=0.3, metavar="CORES", help="that others may take while a run lasts"
    )
    parser.add_argument("--predict-again", action="store_true", help="analyze the kept captures anew; run no job")
    args = parser.parse_args()
    work = Work(args.work.resolve())
    chosen = [pair for pair in PAIRS if re.search(args.only, pair.name) and args.set in (None, pair.set)]

    if args.predict_again:
        chosen = [pair for pair in chosen if work.runs(pair, args.alternations) is not None]
        folders = [
            work.of_run(pair, number, what) / "run"
            for pair in chosen
            for number in range(args.alternations)
            for what in ("planted", "mended")
        ]
        with ProcessPoolExecutor() as pool:
            list(pool.map(predict_again, folders))

    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    known = {pair.name for pair in PAIRS}
    records = {name: record for name, record in before.get("pairs", {}).items() if name in known}
    failed = 0
    for pair in chosen:
        try:
            if not args.predict_again:
                run_pair(work, pair, args.alternations, args.quiet)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"{pair.name}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        runs = work.runs(pair, args.alternations)
        assert runs is not None
        records[pair.name] = judge(pair, *runs)
        print(line(pair.name, records[pair.name]), flush=True)
        write(args.output, result_of(records, work.per_ms()))
    print(json.dumps(result_of(records, None)["summary"], indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
