"""Eighty pairs for calibration: whatever constants a prediction has may come from them.

Three quarters of them were fresh once, and their results were looked at before a constant was changed: c21 to c40
showed what contention for cores does to real compute; after c41 to c60 intervals were made narrower, after c61 to c80
those of small messages wider.
"""

from __future__ import annotations

from typing import Final

from prediction_pair import Pair

_FIRST: Final = (
    Pair(
        "c01 straggler, DDP", "calibration", "ddp", "rank.straggler", "rank 2 of 3 takes 1.5 times as long", False,
        "ddp.py", 3, 40, "--forward-ms 20", "--slow-rank 2 --slow-by 1.5",
    ),
    Pair(
        "c02 straggler now and then, DDP", "calibration", "ddp", "rank.straggler",
        "rank 1 of 2 takes 2.4 times as long, every 4th step", True,
        "ddp.py", 2, 48, "--forward-ms 20", "--slow-rank 1 --slow-by 2.4 --slow-every 4",
    ),
    Pair(
        "c03 straggler, FSDP2", "calibration", "fsdp2", "rank.straggler", "rank 0 of 2 takes 1.6 times as long", False,
        "fsdp.py", 2, 40, "--forward-ms 20", "--slow-rank 0 --slow-by 1.6",
    ),
    Pair(
        "c04 straggler, ring", "calibration", "ring", "rank.straggler", "rank 1 of 3 takes 1.6 times as long", False,
        "ring.py", 3, 40, "--layers 2 --hop-ms 3", "--slow-rank 1 --slow-by 1.6",
    ),
    Pair(
        "c05 straggler, ZeRO-1", "calibration", "engine", "rank.straggler", "rank 1 of 2 takes 1.4 times as long", True,
        "zero.py", 2, 40, "--zero-stage 1 --forward-ms 22", "--slow-rank 1 --slow-by 1.4",
    ),
    Pair(
        "c06 slow disk, DDP", "calibration", "ddp", "data.stall", "a batch takes 40 ms to read", True,
        "ddp.py", 2, 40, "--forward-ms 20 --read-ms 5", "", "--workers {num_workers}",
    ),
    Pair(
        "c07 slow disk, engine", "calibration", "engine", "data.stall", "a batch takes 32 ms to read", False,
        "zero.py", 2, 40, "--zero-stage 1 --forward-ms 16 --read-ms 4", "", "--workers {num_workers}",
    ),
    Pair(
        "c08 loader computes, DDP", "calibration", "ddp", "data.stall", "a batch takes 40 ms to decode", True,
        "ddp.py", 1, 40, "--forward-ms 20 --decode-ms 5", "", "--workers {num_workers}",
    ),
    Pair(
        "c09 small buckets, DDP", "calibration", "ddp", "comm.small-messages", "60 layers, a bucket each",
        True, "ddp.py", 2, 40, "--forward-ms 15 --layers 60 --width 16", "--bucket-mb 0.0001",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c10 small units, FSDP2", "calibration", "fsdp2", "comm.small-messages", "40 layers, each its own unit", False,
        "fsdp.py", 2, 40, "--forward-ms 12 --layers 40", "", "--together {together}",
    ),
    Pair(
        "c11 one bucket, DDP", "calibration", "ddp", "comm.large-bucket", "32 MB of gradients in one bucket", False,
        "ddp.py", 2, 40, "--forward-ms 16 --layers 8 --width 1024", "--bucket-mb 1000", "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c12 garbage, DDP", "calibration", "ddp", "pause.gc", "80,000 objects on rank 0 of 2, walked every step", True,
        "ddp.py", 2, 40, "--forward-ms 20 --heap 80000", "", "--freeze",
    ),
    Pair(
        "c13 unequal lengths, DDP", "calibration", "ddp", "data.imbalance", "lengths from 16 to 240 on 2 ranks", True,
        "ddp.py", 2, 48, "--forward-ms 20 --lengths 16 240", "", "--alike",
    ),
    Pair(
        "c14 slow stage, 1F1B", "calibration", "pipeline", "pipeline.imbalance",
        "stage 2 of 4 takes 2.2 times as long", False,
        "pipeline.py", 4, 36, "--schedule 1F1B --micro-batches 8", "--stage-ms 2 2 4.4 2",
        "--stage-ms 2.6 2.6 2.6 2.6",
    ),
    Pair(
        "c15 slow stage, GPipe", "calibration", "pipeline", "pipeline.imbalance",
        "stage 0 of 2 takes 2.2 times as long", True,
        "pipeline.py", 2, 36, "--schedule GPipe --micro-batches 6", "--stage-ms 6.6 3", "--stage-ms 4.8 4.8",
    ),
    Pair(
        "c16 slow stage, engine", "calibration", "engine", "pipeline.imbalance",
        "stage 0 of 2 takes 2.5 times as long", False,
        "pipeline.py", 2, 36, "--schedule engine --micro-batches 6", "--stage-ms 7.5 3", "--stage-ms 5.25 5.25",
    ),
    Pair(
        "c17 few micro-batches, 1F1B", "calibration", "pipeline", "pipeline.bubble", "3 micro-batches for 3 stages",
        False, "pipeline.py", 3, 36, "--schedule 1F1B --stage-ms 6 6 6", "--micro-batches 3",
        "--micro-batches {n_microbatches}", work_of=("n_microbatches", 3),
    ),
    Pair(
        "c18 checkpoints, DDP", "calibration", "ddp", "checkpoint.stall", "200 ms every 5 steps", True,
        "checkpoint.py", 2, 60, "--every 5 --megabytes 20 --megabytes-per-s 100 --forward-ms 20", "", "--asynchronous",
        whole_run=True,
    ),
    Pair(
        "c19 evaluation on rank 0, DDP", "calibration", "ddp", "eval.uneven", "120 ms every 3 steps, 2 ranks", False,
        "evaluation.py", 2, 60, "--every 3 --batches 8 --forward-ms 15", "", "--shared", whole_run=True,
    ),
    Pair(
        "c20 workers started anew, DDP", "calibration", "ddp", "data.stall", "300 ms every 8 steps", True,
        "workers.py", 2, 64, "--epoch 8 --open-ms 300 --forward-ms 15", "", "--persistent", whole_run=True,
    ),
)  # fmt: skip

_FRESH_FIRST: Final = (
    Pair(
        "c21 straggler, DDP", "calibration", "ddp", "rank.straggler", "rank 0 of 2 takes 1.3 times as long", True,
        "ddp.py", 2, 40, "--forward-ms 24 --layers 6 --width 48", "--slow-rank 0 --slow-by 1.3",
    ),
    Pair(
        "c22 straggler now and then, DDP", "calibration", "ddp", "rank.straggler",
        "rank 0 of 3 takes twice as long, every 3rd step", False,
        "ddp.py", 3, 48, "--forward-ms 18 --layers 3", "--slow-rank 0 --slow-by 2 --slow-every 3",
    ),
    Pair(
        "c23 straggler, FSDP2", "calibration", "fsdp2", "rank.straggler", "rank 1 of 2 takes 1.35 times as long", True,
        "fsdp.py", 2, 40, "--forward-ms 22 --layers 6 --width 64", "--slow-rank 1 --slow-by 1.35",
    ),
    Pair(
        "c24 straggler, ring", "calibration", "ring", "rank.straggler", "rank 0 of 2 takes 1.35 times as long", True,
        "ring.py", 2, 40, "--layers 3 --hop-ms 4", "--slow-rank 0 --slow-by 1.35",
    ),
    Pair(
        "c25 straggler, ZeRO-2", "calibration", "engine", "rank.straggler", "rank 0 of 3 takes 1.7 times as long",
        False,
        "zero.py", 3, 40, "--zero-stage 2 --forward-ms 16 --layers 6", "--slow-rank 0 --slow-by 1.7",
    ),
    Pair(
        "c26 slow disk, DDP", "calibration", "ddp", "data.stall", "a batch takes 60 ms to read", False,
        "ddp.py", 2, 40, "--forward-ms 25 --layers 3 --batch-size 6 --read-ms 10", "", "--workers {num_workers}",
    ),
    Pair(
        "c27 slow disk, engine", "calibration", "engine", "data.stall", "a batch takes 48 ms to read", True,
        "zero.py", 2, 40, "--zero-stage 2 --forward-ms 26 --layers 6 --batch-size 4 --read-ms 12", "",
        "--workers {num_workers}",
    ),
    Pair(
        "c28 loader computes, engine", "calibration", "engine", "data.stall", "a batch takes 24 ms to decode", True,
        "zero.py", 1, 40, "--zero-stage 1 --forward-ms 25 --batch-size 4 --decode-ms 6", "", "--workers {num_workers}",
    ),
    Pair(
        "c29 small buckets, DDP", "calibration", "ddp", "comm.small-messages",
        "90 gradients, each its own bucket, 3 ranks",
        False, "ddp.py", 3, 40, "--forward-ms 18 --layers 45 --width 32", "--bucket-mb 0.0001",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c30 small units, FSDP2", "calibration", "fsdp2", "comm.small-messages", "24 layers, each its own unit", True,
        "fsdp.py", 2, 40, "--forward-ms 10 --layers 24 --width 64", "", "--together {together}",
    ),
    Pair(
        "c31 one bucket, DDP", "calibration", "ddp", "comm.large-bucket", "25 MB of gradients in one bucket", True,
        "ddp.py", 2, 40, "--forward-ms 24 --layers 6 --width 1024", "--bucket-mb 1000", "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c32 garbage, DDP", "calibration", "ddp", "pause.gc", "120,000 objects on rank 0 of 3, walked every 2nd step",
        False,
        "ddp.py", 3, 40, "--forward-ms 18 --layers 6 --heap 120000 --collect-every 2", "", "--freeze",
    ),
    Pair(
        "c33 unequal lengths, DDP", "calibration", "ddp", "data.imbalance", "lengths from 64 to 192 on 3 ranks", False,
        "ddp.py", 3, 48, "--forward-ms 22 --layers 3 --lengths 64 192", "", "--alike",
    ),
    Pair(
        "c34 slow stage, 1F1B", "calibration", "pipeline", "pipeline.imbalance", "stage 1 of 2 takes twice as long",
        True,
        "pipeline.py", 2, 36, "--schedule 1F1B --micro-batches 8 --layers 3", "--stage-ms 3 6", "--stage-ms 4.5 4.5",
    ),
    Pair(
        "c35 slow stage, GPipe", "calibration", "pipeline", "pipeline.imbalance",
        "stage 2 of 3 takes 2.5 times as long",
        False, "pipeline.py", 3, 36, "--schedule GPipe --micro-batches 8", "--stage-ms 2 2 5", "--stage-ms 3 3 3",
    ),
    Pair(
        "c36 slow stage, engine", "calibration", "engine", "pipeline.imbalance",
        "stage 1 of 2 takes 2.2 times as long", True,
        "pipeline.py", 2, 36, "--schedule engine --micro-batches 8 --layers 3", "--stage-ms 2.5 5.5",
        "--stage-ms 4 4",
    ),
    Pair(
        "c37 few micro-batches, GPipe", "calibration", "pipeline", "pipeline.bubble", "4 micro-batches for 4 stages",
        False,
        "pipeline.py", 4, 36, "--schedule GPipe --stage-ms 4 4 4 4", "--micro-batches 4",
        "--micro-batches {n_microbatches}", work_of=("n_microbatches", 4),
    ),
    Pair(
        "c38 checkpoints, DDP", "calibration", "ddp", "checkpoint.stall", "150 ms every 4 steps", False,
        "checkpoint.py", 3, 64, "--every 4 --megabytes 12 --megabytes-per-s 80 --forward-ms 25 --layers 6", "",
        "--asynchronous", whole_run=True,
    ),
    Pair(
        "c39 evaluation on rank 0, DDP", "calibration", "ddp", "eval.uneven", "216 ms every 5 steps, 2 ranks", True,
        "evaluation.py", 2, 60, "--every 5 --batches 12 --forward-ms 18 --layers 6", "", "--shared", whole_run=True,
    ),
    Pair(
        "c40 workers started anew, DDP", "calibration", "ddp", "data.stall", "500 ms every 6 steps", False,
        "workers.py", 2, 48, "--epoch 6 --open-ms 500 --workers 2 --forward-ms 20", "", "--persistent", whole_run=True,
    ),
)  # fmt: skip


_FRESH_SECOND: Final = (
    Pair(
        "c41 straggler, DDP", "calibration", "ddp", "rank.straggler", "rank 1 of 2 takes 1.8 times as long", True,
        "ddp.py", 2, 40, "--forward-ms 20 --layers 5 --width 40", "--slow-rank 1 --slow-by 1.8",
    ),
    Pair(
        "c42 straggler now and then, DDP", "calibration", "ddp", "rank.straggler",
        "rank 1 of 2 takes 3 times as long, every 5th step", False,
        "ddp.py", 2, 50, "--forward-ms 20 --layers 4", "--slow-rank 1 --slow-by 3 --slow-every 5",
    ),
    Pair(
        "c43 straggler, FSDP2", "calibration", "fsdp2", "rank.straggler", "rank 2 of 3 takes 1.5 times as long", False,
        "fsdp.py", 3, 40, "--forward-ms 18 --layers 4 --width 48", "--slow-rank 2 --slow-by 1.5",
    ),
    Pair(
        "c44 straggler, ring", "calibration", "ring", "rank.straggler", "rank 1 of 2 takes 1.7 times as long", True,
        "ring.py", 2, 40, "--layers 2 --hop-ms 5", "--slow-rank 1 --slow-by 1.7",
    ),
    Pair(
        "c45 straggler, ZeRO-2", "calibration", "engine", "rank.straggler", "rank 1 of 2 takes 1.6 times as long", True,
        "zero.py", 2, 40, "--zero-stage 2 --forward-ms 20 --layers 5", "--slow-rank 1 --slow-by 1.6",
    ),
    Pair(
        "c46 slow disk, DDP", "calibration", "ddp", "data.stall", "a batch takes 54 ms to read", True,
        "ddp.py", 2, 40, "--forward-ms 26 --layers 4 --batch-size 6 --read-ms 9", "", "--workers {num_workers}",
    ),
    Pair(
        "c47 slow disk, engine", "calibration", "engine", "data.stall", "a batch takes 35 ms to read, 3 ranks", False,
        "zero.py", 3, 40, "--zero-stage 1 --forward-ms 20 --layers 4 --batch-size 5 --read-ms 7", "",
        "--workers {num_workers}",
    ),
    Pair(
        "c48 loader computes, DDP", "calibration", "ddp", "data.stall", "a batch takes 48 ms to decode", True,
        "ddp.py", 1, 40, "--forward-ms 24 --batch-size 6 --decode-ms 8", "", "--workers {num_workers}",
    ),
    Pair(
        "c49 small buckets, DDP", "calibration", "ddp", "comm.small-messages", "48 layers, a bucket each", True,
        "ddp.py", 2, 40, "--forward-ms 20 --layers 48 --width 24", "--bucket-mb 0.0001",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c50 small units, FSDP2", "calibration", "fsdp2", "comm.small-messages", "30 layers, each its own unit", False,
        "fsdp.py", 2, 40, "--forward-ms 15 --layers 30 --width 96", "", "--together {together}",
    ),
    Pair(
        "c51 one bucket, DDP", "calibration", "ddp", "comm.large-bucket", "40 MB of gradients in one bucket", False,
        "ddp.py", 2, 40, "--forward-ms 22 --layers 10 --width 1024", "--bucket-mb 1000",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c52 garbage, DDP", "calibration", "ddp", "pause.gc", "60,000 objects on rank 0 of 2, walked every step", True,
        "ddp.py", 2, 40, "--forward-ms 24 --layers 5 --heap 60000", "", "--freeze",
    ),
    Pair(
        "c53 unequal lengths, DDP", "calibration", "ddp", "data.imbalance", "lengths from 8 to 248 on 2 ranks", False,
        "ddp.py", 2, 48, "--forward-ms 24 --lengths 8 248", "", "--alike",
    ),
    Pair(
        "c54 slow stage, 1F1B", "calibration", "pipeline", "pipeline.imbalance", "stage 0 of 3 takes twice as long",
        False, "pipeline.py", 3, 36, "--schedule 1F1B --micro-batches 9", "--stage-ms 4.8 2.4 2.4",
        "--stage-ms 3.2 3.2 3.2",
    ),
    Pair(
        "c55 slow stage, GPipe", "calibration", "pipeline", "pipeline.imbalance",
        "stage 1 of 2 takes 2.6 times as long", True,
        "pipeline.py", 2, 36, "--schedule GPipe --micro-batches 5 --layers 3", "--stage-ms 3 7.8", "--stage-ms 5.4 5.4",
    ),
    Pair(
        "c56 slow stage, engine", "calibration", "engine", "pipeline.imbalance", "stage 2 of 3 takes 2.3 times as long",
        False, "pipeline.py", 3, 36, "--schedule engine --micro-batches 8", "--stage-ms 3 3 6.9",
        "--stage-ms 4.3 4.3 4.3",
    ),
    Pair(
        "c57 few micro-batches, 1F1B", "calibration", "pipeline", "pipeline.bubble", "4 micro-batches for 4 stages",
        False, "pipeline.py", 4, 36, "--schedule 1F1B --stage-ms 5 5 5 5", "--micro-batches 4",
        "--micro-batches {n_microbatches}", work_of=("n_microbatches", 4),
    ),
    Pair(
        "c58 checkpoints, DDP", "calibration", "ddp", "checkpoint.stall", "240 ms every 6 steps", True,
        "checkpoint.py", 2, 60, "--every 6 --megabytes 24 --megabytes-per-s 100 --forward-ms 22 --layers 4", "",
        "--asynchronous", whole_run=True,
    ),
    Pair(
        "c59 evaluation on rank 0, DDP", "calibration", "ddp", "eval.uneven", "160 ms every 4 steps, 2 ranks", True,
        "evaluation.py", 2, 60, "--every 4 --batches 10 --forward-ms 16 --layers 4", "", "--shared", whole_run=True,
    ),
    Pair(
        "c60 workers started anew, DDP", "calibration", "ddp", "data.stall", "400 ms every 10 steps", False,
        "workers.py", 2, 60, "--epoch 10 --open-ms 400 --workers 2 --forward-ms 18", "", "--persistent",
        whole_run=True,
    ),
)  # fmt: skip


_FRESH_THIRD: Final = (
    Pair(
        "c61 straggler, DDP", "calibration", "ddp", "rank.straggler", "rank 0 of 2 takes 2.2 times as long", True,
        "ddp.py", 2, 40, "--forward-ms 16 --layers 4 --width 56", "--slow-rank 0 --slow-by 2.2",
    ),
    Pair(
        "c62 straggler now and then, DDP", "calibration", "ddp", "rank.straggler",
        "rank 2 of 3 takes 2.5 times as long, every 4th step", False,
        "ddp.py", 3, 48, "--forward-ms 22 --layers 5", "--slow-rank 2 --slow-by 2.5 --slow-every 4",
    ),
    Pair(
        "c63 straggler, FSDP2", "calibration", "fsdp2", "rank.straggler", "rank 0 of 2 takes 1.45 times as long", False,
        "fsdp.py", 2, 40, "--forward-ms 26 --layers 5 --width 40", "--slow-rank 0 --slow-by 1.45",
    ),
    Pair(
        "c64 straggler, ring", "calibration", "ring", "rank.straggler", "rank 1 of 2 takes 1.55 times as long", True,
        "ring.py", 2, 40, "--layers 4 --hop-ms 3", "--slow-rank 1 --slow-by 1.55",
    ),
    Pair(
        "c65 straggler, ZeRO-2", "calibration", "engine", "rank.straggler", "rank 0 of 2 takes 1.9 times as long", True,
        "zero.py", 2, 40, "--zero-stage 2 --forward-ms 18 --layers 4", "--slow-rank 0 --slow-by 1.9",
    ),
    Pair(
        "c66 slow disk, DDP", "calibration", "ddp", "data.stall", "a batch takes 70 ms to read", True,
        "ddp.py", 2, 40, "--forward-ms 22 --layers 5 --batch-size 10 --read-ms 7", "", "--workers {num_workers}",
    ),
    Pair(
        "c67 slow disk, engine", "calibration", "engine", "data.stall", "a batch takes 44 ms to read", False,
        "zero.py", 2, 40, "--zero-stage 2 --forward-ms 24 --layers 3 --batch-size 4 --read-ms 11", "",
        "--workers {num_workers}",
    ),
    Pair(
        "c68 loader computes, DDP", "calibration", "ddp", "data.stall", "a batch takes 30 ms to decode", True,
        "ddp.py", 1, 40, "--forward-ms 30 --batch-size 5 --decode-ms 6", "", "--workers {num_workers}",
    ),
    Pair(
        "c69 small buckets, DDP", "calibration", "ddp", "comm.small-messages", "60 layers, a bucket each", True,
        "ddp.py", 2, 40, "--forward-ms 14 --layers 60 --width 40", "--bucket-mb 0.0001",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c70 small units, FSDP2", "calibration", "fsdp2", "comm.small-messages", "36 layers, each its own unit", False,
        "fsdp.py", 2, 40, "--forward-ms 20 --layers 36 --width 72", "", "--together {together}",
    ),
    Pair(
        "c71 one bucket, DDP", "calibration", "ddp", "comm.large-bucket", "48 MB of gradients in one bucket", False,
        "ddp.py", 2, 40, "--forward-ms 26 --layers 12 --width 1024", "--bucket-mb 1000",
        "--bucket-mb {bucket_cap_mb}",
    ),
    Pair(
        "c72 garbage, DDP", "calibration", "ddp", "pause.gc", "90,000 objects on rank 0 of 2, walked every step", True,
        "ddp.py", 2, 40, "--forward-ms 28 --layers 4 --heap 90000", "", "--freeze",
    ),
    Pair(
        "c73 unequal lengths, DDP", "calibration", "ddp", "data.imbalance", "lengths from 32 to 288 on 2 ranks", False,
        "ddp.py", 2, 48, "--forward-ms 26 --lengths 32 288", "", "--alike",
    ),
    Pair(
        "c74 slow stage, 1F1B", "calibration", "pipeline", "pipeline.imbalance", "stage 1 of 3 takes 2.2 times as long",
        False, "pipeline.py", 3, 36, "--schedule 1F1B --micro-batches 12", "--stage-ms 2.5 5.5 2.5",
        "--stage-ms 3.5 3.5 3.5",
    ),
    Pair(
        "c75 slow stage, GPipe", "calibration", "pipeline", "pipeline.imbalance",
        "stage 0 of 2 takes 2.4 times as long", True,
        "pipeline.py", 2, 36, "--schedule GPipe --micro-batches 6 --layers 3", "--stage-ms 7.2 3",
        "--stage-ms 5.1 5.1",
    ),
    Pair(
        "c76 slow stage, engine", "calibration", "engine", "pipeline.imbalance", "stage 0 of 3 takes 2.5 times as long",
        False, "pipeline.py", 3, 36, "--schedule engine --micro-batches 10", "--stage-ms 6 2.4 2.4",
        "--stage-ms 3.6 3.6 3.6",
    ),
    Pair(
        "c77 few micro-batches, GPipe", "calibration", "pipeline", "pipeline.bubble", "3 micro-batches for 3 stages",
        False, "pipeline.py", 3, 36, "--schedule GPipe --stage-ms 6 6 6", "--micro-batches 3",
        "--micro-batches {n_microbatches}", work_of=("n_microbatches", 3),
    ),
    Pair(
        "c78 checkpoints, DDP", "calibration", "ddp", "checkpoint.stall", "200 ms every 4 steps", True,
        "checkpoint.py", 2, 60, "--every 4 --megabytes 18 --megabytes-per-s 90 --forward-ms 20 --layers 5", "",
        "--asynchronous", whole_run=True,
    ),
    Pair(
        "c79 evaluation on rank 0, DDP", "calibration", "ddp", "eval.uneven", "252 ms every 6 steps, 2 ranks", True,
        "evaluation.py", 2, 60, "--every 6 --batches 14 --forward-ms 18 --layers 5", "", "--shared", whole_run=True,
    ),
    Pair(
        "c80 workers started anew, DDP", "calibration", "ddp", "data.stall", "350 ms every 7 steps", False,
        "workers.py", 2, 56, "--epoch 7 --open-ms 350 --workers 2 --forward-ms 22", "", "--persistent",
        whole_run=True,
    ),
)  # fmt: skip


CALIBRATION: Final = (*_FIRST, *_FRESH_FIRST, *_FRESH_SECOND, *_FRESH_THIRD)
