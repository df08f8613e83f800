"""Peak memory of a rank for each ZeRO stage, against the formula (Rajbhandari et al. 2020, figure 1).

    python benchmarks/memory.py                   # about a minute; writes benchmarks/results/memory.json

Two ranks (gloo) train 40 million parameters in bf16 with AdamW: bytes a parameter are 16 in stage 0, 4 + 12/N in stage
1, 2 + 14/N in stage 2, 16/N in stage 3. Each stage runs in fresh processes; what is measured is the peak of the
resident set, from before the model is made to after some steps. Named buffers, a few layers' worth by configuration
(buckets of one layer), are shown beside the formula, which knows none: gradients on their way, parameters on their way,
and what stage 3 holds whole at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, LAYERS, RANKS = 2048, 10, 2
LAYER = WIDTH * WIDTH
BYTES = {0: 16.0, 1: 4 + 12 / RANKS, 2: 2 + 14 / RANKS, 3: 16 / RANKS}
BUFFERS = {
    # In elements of bf16. Gradients are summed in fp32, sharded as the masters are; the formula has them in bf16, whole
    # in stages 0 and 1, where each is freed when it goes into a sum. What is named is the rest.
    stage: {
        "gradient just made": LAYER,
        "sums in fp32": {0: 1, 1: 0, 2: 0.5, 3: 0.5}[stage] * LAYER * LAYERS,
        **({"buckets, three and what is received": 4 * LAYER, "gathers, three": 3 * LAYER} if stage else {}),
        **({"whole at a time": 3 * LAYER} if stage == 3 else {}),
    }
    for stage in range(4)
}


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def train(stage: int, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import dsprof.engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)

    def run(width: int, layers: int, steps: int) -> Any:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": width * width, "overlap_comm": True}
        if stage:
            zero["allgather_bucket_size"] = width * width
            zero["sub_group_size"] = width * width
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 3 * width * width,
                     "stage3_prefetch_bucket_size": width * width, "stage3_max_reuse_distance": 0}  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }  # fmt: skip
        engine, *_ = dsprof.engine.initialize(model=model, model_parameters=model.parameters(), config=config)
        for _ in range(steps):
            engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().mean())
            engine.step()
        return engine

    run(64, 2, 2).destroy()  # libraries, threads and caches are not the model's
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    run(WIDTH, LAYERS, 4)
    print(json.dumps({"peak": status("VmHWM") - before}))
    dist.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(int(args.child[0]), int(args.child[1]), args.child[2])
    parameters = LAYERS * LAYER
    stages = {}
    for stage in range(4):
        with tempfile.TemporaryDirectory() as folder:
            children = [
                subprocess.Popen(
                    [sys.executable, __file__, "--child", str(stage), str(rank), f"{folder}/store"],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
                )
                for rank in range(RANKS)
            ]
            outputs = [child.communicate()[0] for child in children]
        peak = max(json.loads(output)["peak"] for output in outputs)
        formula = BYTES[stage] * parameters
        buffers = {name: 2 * elements for name, elements in BUFFERS[stage].items()}
        stages[f"stage {stage}"] = {
            "peak_mb": round(peak / 1e6, 1),
            "formula_mb": round(formula / 1e6, 1),
            "buffers_mb": {name: round(size / 1e6, 1) for name, size in buffers.items()},
            "peak_to_formula_and_buffers": round(peak / (formula + sum(buffers.values())), 3),
        }
    result = {
        "what": "peak resident set of a rank, above what it was before the model was made",
        "parameters": parameters,
        "ranks": RANKS,
        "stages": stages,
        "machine": {"python": platform.python_version()},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(stages, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
