"""The engine against DDP in instructions, where many small tensors make a step: what no clock of a busy machine tells.

    python benchmarks/engine_instructions.py    # writes benchmarks/results/engine_instructions.json, goes on there

The shape `small-parameters` of engine_shapes.py, on two ranks (gloo) that train as in engine.py: AdamW, torch's fused,
and gradients clipped to 1.0. callgrind (valgrind) counts what all threads of all ranks execute in one step, with the
kernels that the processor would take (AVX2: valgrind knows no wider ones); fused multiply-adds count as one, however
long valgrind takes for them, and copies by what a loop takes (`COPIES`). A step takes minutes, so there are `--layers`
(8) of the shape's 48: what is done once a step weighs more then. The tools are those of instructions.py. An arm's count
is written when it is there, and not counted again unless something that it depends on has changed since.

Goals: 1.00, 1.02, 1.05 and 1.10 for the stages 0 to 3, as for the CPU time of engine.py.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from engine_shapes import GPT, SHAPES, Shape
from instructions import COPIES, MALLOC, make_marks, total
from instructions_job import Marks

import dsprof.engine
import engine

HERE: Final = Path(__file__).parent
SHAPE: Final = "small-parameters"
STAGES: Final = (0, 1, 2, 3)
WARM: Final = 3
"""Steps that go as fast as valgrind does."""
INSTRUMENTED: Final = 1
"""Those under callgrind before the one that counts."""
LIMIT_S: Final = 3600


def shape(layers: int) -> Shape:
    return replace(SHAPES[SHAPE], model=lambda: GPT(96, layers))


def take(arm: str, rank: int, folder: Path, layers: int, library: str) -> None:
    """One rank of an arm: a line with its process, and of callgrind a dump."""
    ranks = SHAPES[SHAPE].ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{arm}.store", ranks), rank=rank, world_size=ranks)
    of, marks = shape(layers), Marks(library)
    step, batches = engine.ARMS[arm](of), torch.Generator().manual_seed(rank)
    for number in range(WARM + INSTRUMENTED):
        if number == WARM:
            marks.start()
        step(of.sample(of.batch, batches)).item()
    batch = of.sample(of.batch, batches)
    gc.collect()
    gc.freeze()  # whether a whole collection falls into the step that counts is chance
    dist.barrier()
    marks.forget()
    step(batch).item()
    marks.tell(f"{arm} {rank}")
    os.write(sys.stdout.fileno(), f"{json.dumps({'arm': arm, 'pid': os.getpid()})}\n".encode())
    os._exit(0)


def job(arm: str, folder: Path, layers: int, library: str) -> int:
    """Under callgrind: the arm's ranks, forked from this process."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=take, args=(arm, rank, folder, layers, library)) for rank in range(SHAPES[SHAPE].ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


def count(arm: str, layers: int, library: Path) -> int:
    """Instructions of a step of all ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
                     f"--callgrind-out-file={scratch}/out.%p"]  # fmt: skip
        words = [sys.executable, __file__, "--job", arm, scratch, str(layers), str(library)]
        said = subprocess.run(
            [*callgrind, *words], env={**os.environ, **MALLOC, **COPIES, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True,
        ).stdout  # fmt: skip
        return sum(total(Path(scratch), json.loads(line)["pid"]) for line in said.splitlines() if line[:1] == "{")


def sources() -> str:
    """A digest of what is counted, the engine, and of what counts it."""
    digest = hashlib.sha256()
    for path in sorted([*Path(dsprof.engine.__file__).parent.rglob("*.py"), *HERE.glob("*engine*.py"),
                        *HERE.glob("instructions*")]):  # fmt: skip
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def main() -> int:
    if sys.argv[1:2] == ["--job"]:
        arm, folder, layers, library = sys.argv[2:]
        return job(arm, Path(folder), int(layers), library)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", default=",".join(map(str, STAGES)))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "engine_instructions.json")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("install valgrind (apt install valgrind)")
    arms = ["ddp", *(f"dsprof_z{stage}" for stage in args.stages.split(","))]
    result: dict[str, Any] = {
        "what": f"instructions of a step of {SHAPES[SHAPE].ranks} ranks, and of the engine's the ratio to DDP's",
        "layers": args.layers,
        "of": sources(),
        "tensors": len(list(shape(args.layers).model().parameters())),
        "ratio": {},
        "instructions": {},
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()},
    }
    if args.output.exists():
        before = json.loads(args.output.read_text())
        if all(before.get(key) == result[key] for key in ("layers", "of", "machine")):
            result |= {"ratio": before["ratio"], "instructions": before["instructions"]}
    counted = result["instructions"]
    with tempfile.TemporaryDirectory() as scratch:
        library = make_marks(Path(scratch))
        for arm in arms:
            counted[arm] = counted.get(arm) or count(arm, args.layers, library)
            if arm != "ddp":
                result["ratio"][arm] = round(counted[arm] / counted["ddp"], 4)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{arm}: {counted[arm]:,}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
