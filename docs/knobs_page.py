"""docs/knobs.md, made from the records of the knobs: `python docs/knobs_page.py > docs/knobs.md`."""

from __future__ import annotations

from typing import Final

from dsprof.knobs import KNOBS, Knob

HEAD: Final = """\
# Trying another setting without an edit

`--set KEY=VALUE` runs your job with a knob turned; give it several times to turn several. No file is changed.

    dsprof run --nproc-per-node 2 --set ddp.bucket_cap_mb=50 --set loader.num_workers=4 train.py
    dsprof run --num-gpus 8 --set zero_optimization.reduce_bucket_size=5e7 train.py --deepspeed_config ds.json
    dsprof run --set env.OMP_NUM_THREADS=4 -- srun python train.py

The verdict then says what each was without it, and where, and warns of what was not applied:

    note      this run had --set ddp.bucket_cap_mb=25 (without it: 1), train.py:7
    warning   --set fsdp2.reduce_dtype=bfloat16 was not applied: nothing in the job takes it

Every key of a JSON configuration of DeepSpeed or of dsprof's engine is a knob, too, by its sections:
`zero_optimization.reduce_bucket_size`, `train_micro_batch_size_per_gpu`, `bf16.enabled`. `dsprof knobs` lists those
below, and `dsprof knobs RUN` says what they were in a run:

    $ dsprof knobs dsprof-out
    ddp.bucket_cap_mb  = 25.0 (/job/train.py:7)
    loader.num_workers  = 2 (/job/train.py:10)

A rank applies them when it imports torch, so they need `dsprof run`, or `DSPROF=1` with `DSPROF_SET` as a JSON object:
`DSPROF_SET='{"ddp.bucket_cap_mb": 50}'`.

The last column says what a knob may do to the numbers that you train: *same loss*, *same up to rounding*, or *trains
differently*.

| knob | values | what it does | taken by | numbers |
|---|---|---|---|---|
"""


def render() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(map(_row, KNOBS))


def _row(knob: Knob) -> str:
    values = str(knob.values) + (f" ({knob.unit})" if knob.unit else "")
    return f"| `{knob.key}` | {values} | {knob.says} | {knob.of} | {knob.numbers} |\n"


if __name__ == "__main__":
    print(render(), end="")
