"""docs/knobs.md, made from the records of the knobs: `python docs/knobs_page.py > docs/knobs.md`."""

from __future__ import annotations

from typing import Final

from dsprof.knobs import KNOBS, Knob
from dsprof.knobs.json_config import MAY_CHANGE, knob_of

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

## Does it pay?

`dsprof fix RUN` lists the changes that a run's findings offer and `--set` can make, with what each should save and the
lines of your files to change: arguments of calls, keys of a JSON configuration.

    $ dsprof fix dsprof-out
    1. data.stall  DataLoader(num_workers=2, persistent_workers=True) (slow.py:10); ...
       gain   saves 20.7 ms a step (36 %) [18.6, 22.4]
         -for x in DataLoader(D(), batch_size=1):
         +for x in DataLoader(D(), batch_size=1, num_workers=2, persistent_workers=True):
       try    dsprof run --set loader.num_workers=2 --set loader.persistent_workers=true ...

`--write` writes the changed files beside yours (`slow.fixed.py`, `ds.fixed.json`), and `--in-place` changes yours.
Either all files are written or none: not where a configuration has been edited since the run, where `slow.fixed.py`
is there already, where the run made no such call, or where a call takes `*args` or `**kwargs`, which may hold the
argument. Then you are told why, and what to write by hand.

`dsprof fix RUN --verify` proves one: it runs your job as it was and with the change, in turns and each in processes of
its own, until the difference of the pairs decides (three pairs at least, `--pairs` at most):

    $ dsprof fix dsprof-out --verify
    [dsprof] comparing in dsprof-out/train-20261125T233800Z-1a2b3c-fix-loader.num_workers-2: --set loader.num_workers=2
    [dsprof] pair 1: 55.3 ms a step, 39.4 ms with the change: saves 15.9 ms
    [dsprof] pair 2: 78.8 ms a step, 62.6 ms with the change: saves 16.2 ms
    ...

It ends with what was predicted, what was measured, and `kept` (exit status 0; even the low end of a strict interval
saves 1 % of the step), `withdrawn` (1; even the high end does not, the changed job fails, or its losses are others) or
`undecided` (4). The run's own findings.json and reports tell it from then on, and `--json` prints it. `--set` tries a
change of your own. Both jobs have what `--set` turned in the run. After Ctrl-C the same command goes on where it
stopped; jobs that failed are run again.

The job has to end by itself, or `--steps N` ends it: each rank leaves after its Nth optimizer step as if your script
had called `sys.exit()` there, so what follows training, such as saving, is left out. Use at least 50 steps. A job that
was seen to write checkpoints, or that wrote files where it ran or where its command line says, is only run with
`--yes`, as each job would write them anew; temporary files, caches, and files that have what the job prints do not
count, nor, where a pipe or a scheduler reads that, any text such as `train.log`. Trackers (wandb, MLflow, Neptune,
ClearML) write offline, beside the jobs' folders. A job that hangs is ended (`--hang-timeout` of the first run, or
600 s), and so is one that takes five times as long as the first run and two minutes more.

Where a knob promises *same loss* or *same up to rounding*, the losses of the first 20 steps are compared, rank by rank:
they are what `backward()` is called of. How far two runs of the job as it was are apart is allowed for; where that is
more than 1 %, as the job is not seeded, nothing is compared, and you are told so.

Three pairs decide where a change saves 40 % of the step, or as much as was predicted for it; otherwise five. A change
that does nothing is kept in 0.5 % of the comparisons at most where the step varies from job to job like normal noise,
and in 0.1 % (simulated) of jobs that are as a whole either fast or slow, by chance, say by where their processes land.

## How it works

A rank applies them when it imports torch, so they need `dsprof run`, or `DSPROF=1` with `DSPROF_SET` as a JSON object:
`DSPROF_SET='{"ddp.bucket_cap_mb": 50}'`.

The last column says what a knob may do to the numbers that you train: *same loss*, *same up to rounding*, or *trains
differently*.

| knob | values | what it does | taken by | numbers |
|---|---|---|---|---|
"""


KEYS: Final = """
## Keys of a JSON configuration

Values are checked before a job runs: `zero_optimization.stage=7` is refused. Where the three batch sizes are all
written and you turn one, the batch of a step stays what it is and the third is found anew, so that still
`train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x ranks. For these keys it is
known what they may change in the numbers; any other key counts as *trains differently*.
[engine-config.md](engine-config.md) says what each does.

| key | values | numbers |
|---|---|---|
"""


def render() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(map(_row, KNOBS)) + KEYS + "".join(_short_row(knob_of(key)) for key in MAY_CHANGE)


def _short_row(knob: Knob) -> str:
    return f"| `{knob.key}` | {knob.values} | {knob.numbers} |\n"


def _row(knob: Knob) -> str:
    values = str(knob.values) + (f" ({knob.unit})" if knob.unit else "")
    return f"| `{knob.key}` | {values} | {knob.says} | {knob.of} | {knob.numbers} |\n"


if __name__ == "__main__":
    print(render(), end="")
