"""Faults and what `dsprof fix --verify` makes of them: what is predicted, written before the verifying jobs run,
against what they measure.

    python benchmarks/fix_pairs.py benchmarks/results/fix-pairs.json [NAME ...]

Each pair is run as a user would: `dsprof run` of a job with one fault, and `dsprof fix RUN --verify --json` of the
change that its finding offers. It goes on where it stopped: pairs that are in the file are not run again. The file says
of each the fault, the change, the prediction with its interval, the measure with its own, and the outcome.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically
from dsprof.fix import proposals

JOBS: Final = Path(__file__).resolve().parent / "prediction_jobs"
LONGEST_S: Final = 1800


@dataclass(frozen=True)
class Case:
    """A job with a fault.

    code: of the finding; script, args: of `prediction_jobs`; config: a JSON configuration that the job is given
    real: layers compute; else they sleep
    """

    name: str
    code: str
    script: str
    args: str
    ranks: int = 2
    config: dict[str, Any] | None = None
    real: bool = False


def zero(bucket: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket, "allgather_bucket_size": 500_000_000},
    }


CASES: Final = (
    Case("DDP, a bucket a layer", "comm.small-messages", "ddp.py",
         "--steps 60 --forward-ms 15 --layers 60 --width 32 --bucket-mb 0.0001"),
    Case("DDP, 56 MB in one bucket", "comm.large-bucket", "ddp.py",
         "--steps 60 --forward-ms 30 --layers 14 --width 1024 --bucket-mb 1000"),
    Case("DDP, samples that take 5 ms to read", "data.stall", "ddp.py",
         "--steps 60 --forward-ms 20 --layers 6 --batch-size 6 --read-ms 5"),
    Case("DDP, samples that take 2 ms to decode", "data.stall", "ddp.py",
         "--steps 60 --forward-ms 24 --layers 4 --batch-size 8 --decode-ms 2", ranks=1),
    Case("DDP, 150,000 objects walked every 2nd step", "pause.gc", "ddp.py",
         "--steps 60 --forward-ms 22 --layers 3 --heap 150000 --collect-every 2"),
    Case("FSDP2, 28 layers, each its own unit", "comm.small-messages", "fsdp.py",
         "--steps 60 --forward-ms 14 --layers 28 --width 56"),
    Case("DeepSpeed, reduce_bucket_size of 20,000", "comm.small-messages", "zero_json.py",
         "--steps 60 --forward-ms 12 --layers 40 --width 128", config=zero(20_000)),
    Case("dsprof's engine, reduce_bucket_size of 20,000", "comm.small-messages", "zero_json.py",
         "--own --steps 60 --forward-ms 12 --layers 40 --width 128", config=zero(20_000)),
)  # fmt: skip


def run(case: Case, work: Path) -> dict[str, Any]:
    """The faulty job, profiled once. Gives the first change that its finding offers, or why there is none."""
    folder = work / "run"
    words = [str(JOBS / case.script), *case.args.split()]
    if case.config is not None:
        (work / "ds.json").write_text(json.dumps(case.config, indent=2) + "\n")
        words += ["--deepspeed_config", str(work / "ds.json")]
    ranks = ["--nproc-per-node", str(case.ranks)]
    done = dsprof("run", "-o", str(folder), "--force", "--no-report", "-q", *ranks, *words)
    if done.returncode:
        return {"why": f"the job ended with status {done.returncode}: {done.stderr[-400:]}"}
    found = json.loads((folder / "findings.json").read_text())
    offered = [one for one in proposals(found) if one.code == case.code]
    if not offered:
        codes = [one["code"] for one in found["findings"]]
        return {"why": f"no change is offered for {case.code}; found: {', '.join(codes) or 'nothing'}"}
    number = 1 + list(proposals(found)).index(offered[0])
    step_ms = found["run"]["step_ms"]["mean"]
    return {"step_ms": step_ms, "number": number, "set": dict(offered[0].knobs), "predicted": offered[0].gain}


def verify(work: Path, number: int) -> dict[str, Any]:
    """What `dsprof fix --verify` measures of it."""
    done = dsprof("fix", str(work / "run"), "-n", str(number), "--verify", "--json")
    try:
        measured: dict[str, Any] = json.loads(done.stdout)["measured"]
    except ValueError:
        return {"outcome": "undecided", "why": f"status {done.returncode}: {done.stderr[-400:]}"}
    return measured


def dsprof(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dsprof", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=LONGEST_S, env=environment, check=False)


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all pairs that were measured: error of the prediction, as a part of the saving and of the step."""
    scored = [one for one in pairs if one.get("predicted") and "ms" in one.get("measured", {})]
    errors = sorted(
        abs(one["predicted"]["ms"] - one["measured"]["ms"]) / max(abs(one["measured"]["ms"]), 1e-9) for one in scored
    )
    of_step = sorted(abs(one["predicted"]["ms"] - one["measured"]["ms"]) / one["step_ms"] for one in scored)
    held = sum(one["predicted"]["low"] <= one["measured"]["ms"] <= one["predicted"]["high"] for one in scored)
    signs = sum(one["predicted"]["ms"] * one["measured"]["ms"] > 0 for one in scored)
    return {
        "pairs": len(pairs), "measured": len(scored), "in_interval": held, "right_sign": signs,
        "median_error_of_saving_percent": round(100 * errors[len(errors) // 2], 1) if errors else None,
        "median_error_of_step_percent": round(100 * of_step[len(of_step) // 2], 1) if of_step else None,
        "kept": sum(one.get("measured", {}).get("outcome") == "kept" for one in pairs),
    }  # fmt: skip


def main() -> None:
    result, names = Path(sys.argv[1]), sys.argv[2:]
    pairs: list[dict[str, Any]] = json.loads(result.read_text())["pairs"] if result.exists() else []
    place = Path(os.environ.get("FIX_PAIRS_WORK") or Path(tempfile.gettempdir()) / "dsprof-fix-pairs")

    def write() -> None:
        write_atomically(result, json.dumps({"summary": summary(pairs), "pairs": pairs}, indent=1) + "\n")

    for case in CASES:
        known = next((one for one in pairs if one["name"] == case.name), None)
        if (names and case.name not in names) or (known is not None and ("measured" in known or "why" in known)):
            continue
        work = place / "".join(letter if letter.isalnum() else "-" for letter in case.name)
        work.mkdir(parents=True, exist_ok=True)
        if known is None:
            load = os.getloadavg()[0]
            known = {"name": case.name, "code": case.code, "job": f"{case.script} {case.args}", "ranks": case.ranks}
            known |= {"load": round(load, 1), **run(case, work)}
            pairs.append(known)
            write()  # what is predicted, before it is measured
        if "predicted" in known:
            began = time.monotonic()
            known["measured"] = verify(work, known["number"])
            known["took_s"] = round(time.monotonic() - began)
        write()
        print(json.dumps(known), flush=True)
    print(json.dumps(summary(pairs)))


if __name__ == "__main__":
    main()
