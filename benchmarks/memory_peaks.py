"""Is a rank's peak of memory what is predicted of it? Jobs of dsprof's engine and of FSDP2, each predicted from a run
with other settings, and then run. From case VARIED on, more of what jobs write differs from one to the next.

    python benchmarks/memory_peaks.py          # some minutes; writes benchmarks/results/memory_peaks.json

Two ranks (gloo, CPU) train a small model. What torch's allocator holds is counted to the byte in all threads
(`memory_counted.c`, preloaded): `allocated`, as torch.cuda.max_memory_allocated has it of a GPU. Memory does not depend
on how busy the machine is. dsprof's own sampler reads that count in the place of the resident memory, and
`dsprof whatif`'s prediction for the changed knobs (`dsprof.knobs.memory`) is made from that run, before the changed job
runs. Jobs and changes are drawn from a seed; those from UNSEEN on from another one, after the formulas last changed.
Of FSDP2 the changed job runs three times, and the median counts: a thread of gloo lets go of its buffers when it comes
to it, which moves the peak by a unit or two from run to run (`runs` has all of them). A case is written as soon as it
has run; a benchmark that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).parent
RESULTS: Final = HERE / "results" / "memory_peaks.json"
RANKS, CASES, SEED = 2, 45, 35
UNSEEN, UNSEEN_SEED, RUNS = 30, 3505, 3
VARIED: Final = 15
FEW: Final = 0.02
ACCUMULATION: Final = "gradient_accumulation_steps"
Job = dict[str, Any]
Knobs = dict[str, Any]


# --- what is drawn --------------------------------------------------------------------------------


def drawn(number: int) -> tuple[Job, Knobs]:
    """A job, and what of it is to be changed."""
    chance = random.Random(f"{SEED if number < UNSEEN else UNSEEN_SEED}.{number}")
    shape = {
        "width": chance.choice((64, 96, 128)), "layers": chance.choice((4, 6, 8)), "tokens": 64,
        "recompute": chance.random() < 0.3,
    }  # fmt: skip
    job, knobs = _of_engine(chance, shape) if number % 5 < 3 else _of_fsdp2(chance, shape)
    if number >= VARIED:
        _vary(chance, job, knobs)
    return job, knobs


def _vary(chance: random.Random, job: Job, knobs: Knobs) -> None:
    """What the first cases have all alike: settings of stage 3 in the same proportions or none, batch sizes of which
    one is not written, the type of sums, frozen blocks; of FSDP2, units that some of the ranks share, or of all
    blocks."""
    job["frozen"] = chance.choice((0, 0, job["layers"] // 2))
    if job["framework"] == "fsdp2":
        blocks, reshard = chance.choice((2, job["layers"], 2 * job["layers"])), chance.choice((True, False, 2))
        job["reshard"] = reshard
        turned = [{"fsdp2.modules_per_unit": blocks}]
        turned += [{"fsdp2.reshard_after_forward": value} for value in (True, False, 2) if value is not reshard]
        knobs.clear()
        knobs.update(chance.choice(turned))
        return
    config, elements = job["config"], job["layers"] * 8 * job["width"] ** 2
    zero = config["zero_optimization"]
    for key, parts in {
        "stage3_param_persistence_threshold": (None, 0, elements // 100),
        "stage3_prefetch_bucket_size": (None, 0, elements // 16, elements // 4),
        "stage3_max_live_parameters": (None, elements // 8, elements // 2),
        "stage3_max_reuse_distance": (None, 0, elements // 2, 2 * elements),
    }.items():
        zero.pop(key)
        value = chance.choice(parts)
        if value is not None:
            zero[key] = value
    if chance.random() < 0.4:
        each, accumulated = (config.get(key) for key in ("train_micro_batch_size_per_gpu", ACCUMULATION))
        config["train_batch_size"] = each * accumulated * RANKS
        del config[ACCUMULATION]
        # The batch stays, so that another micro-batch has to divide it.
        if "train_micro_batch_size_per_gpu" in knobs:
            knobs["train_micro_batch_size_per_gpu"] = 1 if each > 1 else 3
            config["train_batch_size"] *= 1 if each > 1 or accumulated == 3 else 3
    if config["bf16"]["enabled"] and chance.random() < 0.4:
        config["data_types"] = {"grad_accum_dtype": "bf16"}


def _of_engine(chance: random.Random, shape: Job) -> tuple[Job, Knobs]:
    elements = shape["layers"] * 8 * shape["width"] ** 2
    sizes = [elements // part for part in (16, 8, 4, 2)]
    zero: Knobs = {
        "stage": chance.choice((0, 1, 2, 3)), "overlap_comm": chance.random() < 0.5,
        "reduce_bucket_size": chance.choice(sizes), "allgather_bucket_size": chance.choice(sizes),
        # As large a part of so small a model as the defaults are of a large one.
        "stage3_param_persistence_threshold": shape["width"] * 5, "stage3_prefetch_bucket_size": elements // 16,
        "stage3_max_live_parameters": elements // 4, "stage3_max_reuse_distance": elements // 4,
    }  # fmt: skip
    if zero["stage"] and chance.random() < 0.3:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: Job = {
        "train_micro_batch_size_per_gpu": chance.choice((1, 2, 4)),
        ACCUMULATION: chance.choice((1, 1, 3)),
        "bf16": {"enabled": chance.random() < 0.6}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    least = 1 if "offload_optimizer" in zero else 0
    changes: dict[str, list[Any]] = {
        "zero_optimization.stage": [stage for stage in range(least, 4) if stage != zero["stage"]],
        "zero_optimization.reduce_bucket_size": [size for size in sizes if size != zero["reduce_bucket_size"]],
        "zero_optimization.overlap_comm": [not zero["overlap_comm"]],
        "train_micro_batch_size_per_gpu": [
            size for size in (1, 2, 4, 8) if size != config["train_micro_batch_size_per_gpu"]
        ],
    }
    keys = chance.sample(sorted(changes), chance.choice((1, 2)))
    return {**shape, "framework": "engine", "config": config}, {key: chance.choice(changes[key]) for key in keys}


def _of_fsdp2(chance: random.Random, shape: Job) -> tuple[Job, Knobs]:
    job = {
        **shape, "framework": "fsdp2", "batch": chance.choice((2, 4, 8)), "mixed": chance.random() < 0.5,
        "blocks_a_unit": 1, "reshard": chance.random() < 0.5, "foreach": False,
    }  # fmt: skip
    changes: list[Knobs] = [
        {"fsdp2.reshard_after_forward": not job["reshard"]},
        *({"fsdp2.modules_per_unit": count} for count in (2, 4) if job["reshard"]),
    ]
    return job, chance.choice(changes)


def changed(job: Job, knobs: Knobs) -> Job:
    """The job with these settings."""
    names = {"fsdp2.reshard_after_forward": "reshard", "fsdp2.modules_per_unit": "blocks_a_unit"}
    job = copy.deepcopy(job)
    for key, value in knobs.items():
        if key in names:
            job[names[key]] = value
            continue
        *sections, last = key.split(".")
        into = job["config"]
        for section in sections:
            into = into[section]
        into[last] = value
    return job


# --- runs -----------------------------------------------------------------------------------------


def run(job: Job, folder: Path, watched: bool) -> list[int]:
    """Peak of each rank, bytes; a trace is in `folder` if it is watched by dsprof. Ranks are forks of this process."""
    from memory_job import train

    (folder / "run").mkdir(parents=True)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "DSPROF": int(watched)}
            os.environ.update({name: str(value) for name, value in named.items()}, DSPROF_RUN=str(folder / "run"))
            peak = train(job, rank, str(folder / "store"), RANKS)
            (folder / f"peak{rank}").write_text(str(peak))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise RuntimeError(f"ranks of {job} ended with {statuses}")
    return [int((folder / f"peak{rank}").read_text()) for rank in range(RANKS)]


def case(number: int) -> dict[str, Any]:
    """Predicted, then measured."""
    import pandas as pd

    from dsprof.analyzer.memory.use_by_step import memory_uses, sum_memory
    from dsprof.knobs.memory import memory_with
    from dsprof.run import RunFolder
    from dsprof.trace import load

    job, knobs = drawn(number)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as others:
        before = run(job, Path(first), watched=True)
        trace = load(RunFolder(Path(first) / "run"))
        table = pd.concat([sum_memory(trace.rows[trace.rows["rank"] == rank], rank) for rank in range(RANKS)])
        uses = memory_uses(table, trace.run)
        told = memory_with(knobs, uses, trace.run.facts_by_kind(), RANKS)
        result: dict[str, Any] = {
            "job": job,
            "knobs": knobs,
            "peak": before,
            "parts": [dict(use.parts) for use in uses],
        }
        if not told:
            return {**result, "refused": True}
        times = RUNS if job["framework"] == "fsdp2" else 1
        runs = [run(changed(job, knobs), Path(others) / str(number), watched=False) for number in range(times)]
    measured = [sorted(peaks)[times // 2] for peaks in zip(*runs, strict=True)]
    predicted = [round(rank.then) for rank in told]
    errors = [100 * (then / peak - 1) for then, peak in zip(predicted, measured, strict=True)]
    found = {"predicted": predicted, "measured": measured, "error_percent": [round(e, 2) for e in errors]}
    return {**result, **found, **({"runs": runs} if times > 1 else {})}


def summary(cases: dict[str, Any]) -> dict[str, Any]:
    errors = {name: max(map(abs, one["error_percent"])) for name, one in cases.items() if "error_percent" in one}
    moved = [max(abs(m / p - 1) for m, p in zip(one["measured"], one["peak"], strict=True))
             for one in cases.values() if "measured" in one]  # fmt: skip
    return {
        "cases": len(cases), "refused": len(cases) - len(errors),
        "within_2_percent": sum(error <= 100 * FEW for error in errors.values()),
        "largest_error_percent": max(errors.values(), default=None),
        "median_error_percent": sorted(errors.values())[len(errors) // 2] if errors else None,
        "median_change_percent": round(100 * sorted(moved)[len(moved) // 2], 1) if moved else None,
    }  # fmt: skip


def preloaded() -> None:
    """Begin anew with the counter, if it is not there."""
    if hasattr(ctypes.CDLL(None), "counted_now"):
        return
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "memory_counted.so"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", built, HERE / "memory_counted.c", "-ldl", "-lpthread"], check=True
        )
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(built)}).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    args = parser.parse_args()
    preloaded()
    sys.path.insert(0, str(HERE))
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"cases": {}}
    for number in range(CASES) if args.only is None else args.only:
        if str(number) in found["cases"]:
            continue
        found["cases"][str(number)] = one = case(number)
        found["summary"] = summary({n: one for n, one in found["cases"].items() if int(n) < UNSEEN})
        found["unseen"] = summary({n: one for n, one in found["cases"].items() if int(n) >= UNSEEN})
        args.output.write_text(json.dumps(found, indent=1) + "\n")
        print(number, one["knobs"], one.get("error_percent", "refused"), flush=True)
    print(json.dumps({name: found[name] for name in ("summary", "unseen")}, indent=1))


if __name__ == "__main__":
    main()
