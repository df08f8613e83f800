"""`dsprof plan`: how fast a job would be on other ranks, before it is run there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.launch import LaunchError
from dsprof.run import RunError

from .runs import UNREADABLE, fail, find_run, reading

if TYPE_CHECKING:
    from dsprof.plan.table import Measurements

NOT_TOLD: Final = 4
"""Exit status where a run does not tell."""
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
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    vocab: Annotated[int, typer.Option(min=1, help="Words of the vocabulary.")] = 51200,
    global_batch: Annotated[int | None, _size("Sequences of a step, all ranks together.")] = None,
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
        str, typer.Option(metavar="NAME", help="The device, such as a100, h100, h200: its peak, memory and link.")
    ] = "a100",
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", show_default=False, help="Memory of a device. Default: its own.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp16|fp32", help="Number format of matrix products.")] = "bf16",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share the fast link.")] = 8,
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
    with more replicas (weak scaling).

    The exit status is 4 if the run does not tell.
    """
    if run is not None:
        given = (calibrate, predict, params, hidden, layers, global_batch, micro_batch, tp, dp, pp)
        if any(value is not None for value in given):
            raise LaunchError(
                "of a RUN the batch of a rank and the layout stay as they are; leave out sizes, layouts and tables, or "
                "leave out RUN"
            )
        return _answer_run(run, ranks, gpus_per_node, bandwidth, latency, as_json)
    from dsprof.plan.hardware import Cluster, UnknownGpu, find_gpu, read_latency, read_rate
    from dsprof.plan.layouts import NoLayout, Wanted

    learnt, asked = _tables(calibrate, predict)
    if ranks is None:
        if learnt is None:
            raise LaunchError(
                "nothing to plan from; give --calibrate TABLE, a CSV of measured steps, or --ranks N with the sizes of "
                "the model (--params 7e9, or --hidden and --layers) and --global-batch"
            )
        return _answer_table(learnt, asked, as_json)
    if asked is not None:
        raise LaunchError("--predict tells the steps of a table, --ranks those of one model; give one of them")
    if global_batch is None:
        raise LaunchError("--global-batch is not given: how many sequences a step has, all ranks together")
    if dtype not in DTYPES:
        raise LaunchError(f"--dtype {dtype}: is not known; write one of {', '.join(DTYPES)}")
    from dsprof.plan.formulas import model_of, plan_from_formulas

    try:
        device = find_gpu(gpu)
        rate = None if bandwidth is None else read_rate(bandwidth)
        wait = None if latency is None else read_latency(latency)
        cluster = Cluster(device, DTYPES[dtype], rate, wait)
        if cluster.peak is None:
            raise LaunchError(f"--dtype {dtype}: the data sheet of {device.name} has no peak for it")
        model, assumed = model_of(params, hidden, layers, heads, seq, vocab, global_batch)
        whole = steps if tokens is None else tokens / model.tokens
        wanted = Wanted(tp, dp, pp, micro_batch, zero_stage, recompute)
        plan = plan_from_formulas(
            model, ranks, cluster, gpus_per_node, wanted, learnt, whole, price, assumed, memory_gib
        )  # fmt: skip
    except (UnknownGpu, NoLayout, ValueError) as error:
        raise LaunchError(str(error)) from error
    if as_json:
        print(json.dumps(plan.to_dict(), indent=1))
    else:
        from dsprof.reports.plans import render_plan

        sys.stdout.write(render_plan(plan))
    return 0


def _answer_run(
    run: Path, ranks: int | None, per_node: int, bandwidth: str | None, latency: str | None, as_json: bool
) -> int:
    from dsprof import reports
    from dsprof.plan.from_run import CannotPlan, Network, plan_from_run
    from dsprof.plan.hardware import read_latency, read_rate
    from dsprof.reports.plans import render_run_plan

    if ranks is None:
        raise LaunchError("--ranks is not given: for how many ranks to plan")
    try:
        network = Network(
            per_node,
            None if bandwidth is None else read_rate(bandwidth),
            None if latency is None else read_latency(latency),
        )
    except ValueError as error:
        raise LaunchError(str(error)) from error
    try:
        folder = find_run(run)
        with reading(folder):
            study = reports.measure(folder)
    except RunError as error:
        fail(error, UNREADABLE)
    try:
        plan = plan_from_run(study, ranks, network)
    except CannotPlan as error:
        raise LaunchError(f"{folder.path}: {error}", status=NOT_TOLD) from error
    sys.stdout.write(json.dumps(plan.to_dict(), indent=1) + "\n" if as_json else render_run_plan(plan))
    return 0


def _tables(calibrate: Path | None, predict: Path | None) -> tuple[Measurements | None, Measurements | None]:
    from dsprof.plan.table import TableError, read_table

    try:
        learnt = None if calibrate is None else read_table(calibrate)
        return learnt, None if predict is None else read_table(predict, timed=False)
    except TableError as error:
        raise LaunchError(str(error)) from error


def _answer_table(learnt: Measurements, asked: Measurements | None, as_json: bool) -> int:
    from dsprof.plan.told import from_table
    from dsprof.reports.plans import render_calibration

    told = from_table(learnt, asked)
    sys.stdout.write(json.dumps(told.to_dict(), indent=1) + "\n" if as_json else render_calibration(told))
    return 0
