"""The hundred pairs of `predictions.py`: eighty for calibration (`calibration_pairs.py`) and twenty fresh ones.

The fresh ones plant the same faults at other magnitudes and places, on other numbers of ranks and shapes of model.
Nothing may be tuned to them: they were chosen, and committed, before one of them had run.
"""

from __future__ import annotations

from typing import Final

from calibration_pairs import CALIBRATION
from prediction_pair import Pair

FRESH: Final = (
    Pair(
        "f01 straggler, DDP", "fresh", "ddp", "rank.straggler", "rank 1 of 2 takes 1.35 times as long", True,
        "ddp.py", 2, 40, "--forward-ms 28 --layers 7 --width 32", "--slow-rank 1 --slow-by 1.35",
    ),
    Pair(
        "f02 straggler now and then, DDP", "fresh", "ddp", "rank.straggler",
        "rank 0 of 2 takes 2.8 times as long, every 3rd step", True,
        "ddp.py", 2, 48, "--forward-ms 18 --layers 4", "--slow-rank 0 --slow-by 2.8 --slow-every 3",
    ),
    Pair(
        "f03 straggler, FSDP2", "fresh", "fsdp2", "rank.straggler", "rank 1 of 3 takes 1.75 times as long", False,
        "fsdp.py", 3, 40, "--forward-ms 20 --layers 3 --width 80", "--slow-rank 1 --slow-by 1.75",
    ),
    Pair(
        "f04 straggler, ring", "fresh", "ring", "rank.straggler", "rank 2 of 3 takes 1.45 times as long", False,
        "ring.py", 3, 40, "--layers 3 --hop-ms 5", "--slow-rank 2 --slow-by 1.45",
    ),
    Pair(
        "f05 straggler, ZeRO-1", "fresh", "engine", "rank.straggler", "rank 0 of 2 takes 1.5 times as long", True,
        "zero.py", 2, 40, "--zero-stage 1 --forward-ms 26 --layers 7", "--slow-rank 0 --slow-by 1.5",
    ),
    Pair(
        "f06 slow disk, DDP", "fresh", "ddp", "data.stall", "a batch takes 45 ms to read, 3 ranks", False,
        "ddp.py", 3, 40, "--forward-ms 20 --layers 6 --batch-size 9 --read-ms 5", "", "--workers {num_workers}",
    ),
    Pair(
        "f07 slow disk, engine", "fresh", "engine", "data.stall", "a batch takes 65 ms to read", True,
        "zero.py", 2, 40, "--zero-stage 1 --forward-ms 22 --layers 4 --batch-size 5 --read-ms 13", "",
        "--workers {num_workers}",
    ),
    Pair(
        "f08 loader computes, engine", "fresh", "engine", "data.stall", "a batch takes 35 ms to decode", True,
        "zero.py", 1, 40, "--zero-stage 2 --forward-ms 22 --batch-size 5 --decode-ms 7", "", "--workers {num_workers}",
    ),
    Pair(
        "f09 small buckets, DDP", "fresh", "ddp", "comm.small-messages", "70 layers, a bucket each", False,
        "ddp.py", 2, 40, "--forward-ms 16 --layers 70 --width 28", "--bucket-mb 0.0001",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "f10 small units, FSDP2", "fresh", "fsdp2", "comm.small-messages", "28 layers, each its own unit", True,
        "fsdp.py", 2, 40, "--forward-ms 14 --layers 28 --width 56", "", "--together {together}",
    ),
    Pair(
        "f11 one bucket, DDP", "fresh", "ddp", "comm.large-bucket", "56 MB of gradients in one bucket", True,
        "ddp.py", 2, 40, "--forward-ms 30 --layers 14 --width 1024", "--bucket-mb 1000",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "f12 garbage, DDP", "fresh", "ddp", "pause.gc", "150,000 objects on rank 0 of 2, walked every 2nd step", False,
        "ddp.py", 2, 40, "--forward-ms 22 --layers 3 --heap 150000 --collect-every 2", "", "--freeze",
    ),
    Pair(
        "f13 unequal lengths, DDP", "fresh", "ddp", "data.imbalance", "lengths from 24 to 200 on 2 ranks", True,
        "ddp.py", 2, 48, "--forward-ms 22 --layers 4 --lengths 24 200", "", "--alike",
    ),
    Pair(
        "f14 slow stage, 1F1B", "fresh", "pipeline", "pipeline.imbalance", "stage 1 of 2 takes 2.6 times as long", True,
        "pipeline.py", 2, 36, "--schedule 1F1B --micro-batches 6 --layers 2", "--stage-ms 3 7.8",
        "--stage-ms 5.4 5.4",
    ),
    Pair(
        "f15 slow stage, GPipe", "fresh", "pipeline", "pipeline.imbalance", "stage 1 of 3 takes 2.4 times as long",
        False, "pipeline.py", 3, 36, "--schedule GPipe --micro-batches 7", "--stage-ms 2.5 6 2.5",
        "--stage-ms 3.67 3.67 3.67",
    ),
    Pair(
        "f16 slow stage, engine", "fresh", "engine", "pipeline.imbalance", "stage 1 of 2 takes 2.8 times as long", True,
        "pipeline.py", 2, 36, "--schedule engine --micro-batches 10 --layers 2", "--stage-ms 2.5 7",
        "--stage-ms 4.75 4.75",
    ),
    Pair(
        "f17 few micro-batches, 1F1B", "fresh", "pipeline", "pipeline.bubble", "3 micro-batches for 3 stages", False,
        "pipeline.py", 3, 36, "--schedule 1F1B --stage-ms 7 7 7", "--micro-batches 3",
        "--micro-batches {n_microbatches}", work_of=("n_microbatches", 3),
    ),
    Pair(
        "f18 checkpoints, DDP", "fresh", "ddp", "checkpoint.stall", "160 ms every 3 steps, 3 ranks", False,
        "checkpoint.py", 3, 60, "--every 3 --megabytes 16 --megabytes-per-s 100 --forward-ms 24 --layers 4", "",
        "--asynchronous", whole_run=True,
    ),
    Pair(
        "f19 evaluation on rank 0, DDP", "fresh", "ddp", "eval.uneven", "180 ms every 5 steps, 2 ranks", False,
        "evaluation.py", 2, 60, "--every 5 --batches 9 --forward-ms 20 --layers 4", "", "--shared", whole_run=True,
    ),
    Pair(
        "f20 workers started anew, DDP", "fresh", "ddp", "data.stall", "450 ms every 8 steps", False,
        "workers.py", 2, 64, "--epoch 8 --open-ms 450 --workers 1 --forward-ms 20", "", "--persistent",
        whole_run=True,
    ),
)  # fmt: skip

PAIRS: Final = (*CALIBRATION, *FRESH)
