"""`dsprof plan`: how fast a job would be on other ranks, before it is run there."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.launch import LaunchError
from dsprof.run import RunError

from .runs import UNREADABLE, fail, find_run, reading

if TYPE_CHECKING:
    from dsprof.plan.hardware import Cluster
    from dsprof.plan.layouts import Wanted
    from dsprof.plan.table import Measurements

NOT_TOLD: Final = 4
"""Exit status where a run does not tell."""
SAME: Final = "same"
"""What is given to --global-batch for the one that a run had."""
SEQUENCE: Final = 2048
DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _size(says: str, **more: Any) -> Any:
    return typer.Option(show_default=False, min=1, help=says, **more)


def command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", show_default=False, help="A measured run to plan from: its folder."),
    ] = None,
    *,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="TABLE",
            show_default=False,
            help="Learn the hardware's figures from measured steps: a CSV with a row a step, its sizes and its time.",
        ),
    ] = None,
    predict: Annotated[
        Path | None,
        typer.Option(
            "--predict",
            metavar="TABLE",
            show_default=False,
            help="Predict the steps of another such table; where it has times, say how well they are met.",
        ),
    ] = None,
    ranks: Annotated[int | None, _size("Plan for so many ranks.")] = None,
    params: Annotated[
        float | None, typer.Option(metavar="P", show_default=False, help="Parameters of the model, such as 7e9.")
    ] = None,
    hidden: Annotated[int | None, _size("Width of the model.")] = None,
    layers: Annotated[int | None, _size("Layers of the model.")] = None,
    heads: Annotated[int | None, _size("Attention heads. Default: of width 128.")] = None,
    seq: Annotated[int | None, _size("Tokens of a sequence. Default: 2048.")] = None,
    vocab: Annotated[int | None, _size("Words of the vocabulary. Default: 51200.")] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|same",
            show_default=False,
            help="Sequences of a step, all ranks together. Of a RUN: samples, or `same` to keep the run's; default: as "
            "many a rank as in the run.",
        ),
    ] = None,
    micro_batch: Annotated[int | None, _size("Sequences of a micro-batch. Default: the best.")] = None,
    tp: Annotated[int | None, _size("Tensor parallelism. Default: the best.")] = None,
    dp: Annotated[int | None, _size("Data parallelism. Default: the best.")] = None,
    pp: Annotated[int | None, _size("Pipeline stages. Default: the best.")] = None,
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=3, show_default=False, help="ZeRO stage. Default: the best.")
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute", show_default=False, help="Compute activations again. Default: the best."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="The device, such as a100, h100, h200: its peak, memory and link. Default: a100; of a RUN its own.",
        ),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", show_default=False, help="Memory of a device. Default: its own.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp16|fp32", show_default=False, help="Number format of matrix products. Default: bf16."
        ),
    ] = None,
    gpus_per_node: Annotated[int | None, _size("Ranks that share the fast link. Default: 8.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", show_default=False, help="Of a node's network, all its adapters together: 400Gb, 50GB."
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", show_default=False, help="Of the network, such as 5us.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(metavar="N", show_default=False, help="Tokens of the whole training, for its cost.")
    ] = None,
    steps: Annotated[
        float | None, typer.Option(metavar="N", show_default=False, help="Steps of the whole training, for its cost.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="MONEY", show_default=False, help="Of one rank's hour.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The answer as JSON, on stdout.")] = False,
) -> int:
    """Say how long training steps would take on other ranks, with intervals, before any GPU hour.

    From a table of measured steps (--calibrate) one model of few figures is learnt, each readable as a figure of the
    hardware; --predict tells the steps of another table. With --ranks and the sizes of a model, the best layouts that
    fit into memory, a curve over rank counts, and what the training costs. With RUN and --ranks, what that run would do
    with more replicas: each with the batch of one in the run, or with --global-batch all together; and which layouts
    of those ranks would be fastest, each replayed beside the layout that ran.

    The exit status is 4 if the run does not tell.
    """
    model = {
        "params": params, "hidden": hidden, "layers": layers, "heads": heads, "seq": seq, "vocab": vocab,
        "micro-batch": micro_batch, "tp": tp, "dp": dp, "pp": pp, "zero-stage": zero_stage, "recompute": recompute,
        "memory-gib": memory_gib,
    }  # fmt: skip
    cost = {"tokens": tokens, "steps": steps, "price": price}
    for name, value in {"params": params, "memory-gib": memory_gib, **cost}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise LaunchError(f"--{name} {value:g}: has to be a number above 0")
    if tokens is not None and steps is not None:
        raise LaunchError("--tokens and --steps both say how long the training is; give one of them")
    machine = ClusterOptions(gpu, dtype, gpus_per_node or 8, bandwidth, latency)
    from dsprof.plan.layouts import Wanted

    if run is not None:
        layout = {"tp", "dp", "pp", "zero-stage", "recompute"}
        of_model = {name: value for name, value in model.items() if name not in layout}
        _refuse(
            "of a RUN the model stays as it is",
            {**of_model, "calibrate": calibrate, "predict": predict, "dtype": dtype},
        )
        fixed = Wanted(tp=tp, dp=dp, pp=pp, zero=zero_stage, recompute=recompute)
        return _answer_run(run, ranks, machine, fixed, global_batch, steps, tokens, price, as_json)
    from dsprof.plan.hardware import UnknownGpu
    from dsprof.plan.layouts import NoLayout

    learnt, asked = _tables(calibrate, predict)
    if ranks is None:
        if learnt is None:
            raise LaunchError(
                "nothing to plan from; give --calibrate TABLE, a CSV of measured steps, or --ranks N with the sizes of "
                "the model (--params 7e9, or --hidden and --layers) and --global-batch"
            )
        _refuse(
            "without --ranks no model is planned",
            {**model, **cost, "global-batch": global_batch, "gpus-per-node": gpus_per_node},
        )
        return _answer_table(learnt, asked, machine, as_json)
    if asked is not None:
        raise LaunchError("--predict tells the steps of a table, --ranks those of one model; give one of them")
    if global_batch is None:
        raise LaunchError("--global-batch is not given: how many sequences a step has, all ranks together")
    sequences = _whole(global_batch)
    if sequences is None:
        raise LaunchError("--global-batch same: keeps that of a RUN, and none is given; write a number of sequences")
    from dsprof.plan.formulas import model_of, plan_from_formulas
    from dsprof.plan.steps import VOCABULARY

    try:
        cluster = machine.cluster()
        planned, assumed = model_of(params, hidden, layers, heads, seq or SEQUENCE, vocab or VOCABULARY, sequences)
        whole = steps if tokens is None else tokens / planned.tokens
        wanted = Wanted(tp, dp, pp, micro_batch, zero_stage, recompute)
        plan = plan_from_formulas(
            planned, ranks, cluster, machine.gpus_per_node, wanted, learnt, whole, price, assumed, memory_gib
        )
    except (UnknownGpu, NoLayout, ValueError) as error:
        raise LaunchError(str(error)) from error
    if as_json:
        print(json.dumps(plan.to_dict(), indent=1))
    else:
        from dsprof.reports.plans import render_plan

        sys.stdout.write(render_plan(plan))
    return 0


@dataclass(frozen=True)
class ClusterOptions:
    """What was typed of it."""

    gpu: str | None
    dtype: str | None
    gpus_per_node: int
    bandwidth: str | None
    latency: str | None

    @property
    def given(self) -> bool:
        return any(word is not None for word in (self.gpu, self.dtype, self.bandwidth, self.latency))

    def cluster(self) -> Cluster:
        """Raises LaunchError, UnknownGpu, and ValueError of the rates."""
        from dsprof.plan.hardware import Cluster, find_gpu

        dtype = self.dtype or "bf16"
        if dtype not in DTYPES:
            raise LaunchError(f"--dtype {dtype}: is not known; write one of {', '.join(DTYPES)}")
        device = find_gpu(self.gpu or "a100")
        cluster = Cluster(device, DTYPES[dtype], *self.rates())
        if cluster.peak is None:
            raise LaunchError(f"--dtype {dtype}: the data sheet of {device.name} has no peak for it")
        return cluster

    def rates(self) -> tuple[float | None, float | None]:
        """GB/s and microseconds. Raises ValueError."""
        from dsprof.plan.hardware import read_latency, read_rate

        return (
            None if self.bandwidth is None else read_rate(self.bandwidth),
            None if self.latency is None else read_latency(self.latency),
        )


def _refuse(why: str, options: Mapping[str, Any]) -> None:
    """Raises LaunchError where options are given that this kind of plan does not look at."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise LaunchError(f"{why}; leave out {', '.join(given)}")


def _whole(word: str) -> int | None:
    """A global batch; None: the run's. Raises LaunchError."""
    if word == SAME:
        return None
    if not word.isdecimal() or int(word) == 0:
        raise LaunchError(f"--global-batch {word}: is not a whole number above 0, nor `{SAME}`")
    return int(word)


def _answer_run(
    run: Path, ranks: int | None, machine: ClusterOptions, wanted: Wanted, global_batch: str | None,
    steps: float | None, tokens: float | None, price: float | None, as_json: bool,
) -> int:  # fmt: skip
    from dsprof import reports
    from dsprof.plan.changes import CannotPlan
    from dsprof.plan.hardware import UnknownGpu, find_gpu
    from dsprof.plan.network import Network
    from dsprof.plan.run_answer import answer_run
    from dsprof.reports.plans import render_run_answer

    if ranks is None:
        raise LaunchError("--ranks is not given: for how many ranks to plan")
    batch = None if global_batch is None else _whole(global_batch)
    try:
        network = Network.of_words(machine.gpus_per_node, machine.bandwidth, machine.latency)
        gpu = None if machine.gpu is None else find_gpu(machine.gpu)
    except (UnknownGpu, ValueError) as error:
        raise LaunchError(str(error)) from error
    try:
        folder = find_run(run)
        with reading(folder):
            study = reports.measure(folder)
    except RunError as error:
        fail(error, UNREADABLE)
    try:
        found = answer_run(study, ranks, network, wanted, gpu, batch, global_batch == SAME, steps, tokens, price)
    except CannotPlan as error:
        raise LaunchError(f"{folder.path}: {error}", status=NOT_TOLD) from error
    sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n" if as_json else render_run_answer(found))
    return 0


def _tables(calibrate: Path | None, predict: Path | None) -> tuple[Measurements | None, Measurements | None]:
    from dsprof.plan.table import TableError, read_table

    try:
        learnt = None if calibrate is None else read_table(calibrate)
        return learnt, None if predict is None else read_table(predict, timed=False)
    except TableError as error:
        raise LaunchError(str(error)) from error


def _answer_table(learnt: Measurements, asked: Measurements | None, machine: ClusterOptions, as_json: bool) -> int:
    from dsprof.plan.hardware import UnknownGpu
    from dsprof.plan.told import from_table
    from dsprof.reports.plans import render_calibration

    try:
        told = from_table(learnt, asked, machine.cluster() if machine.given else None)
    except (UnknownGpu, ValueError) as error:
        raise LaunchError(str(error)) from error
    sys.stdout.write(json.dumps(told.to_dict(), indent=1) + "\n" if as_json else render_calibration(told))
    return 0
