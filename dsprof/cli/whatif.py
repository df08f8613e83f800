"""`dsprof whatif`: what changes would save, alone and together, without running the job again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsprof.launch import LaunchError
from dsprof.run import DEFAULT_PARENT, RunError

from .runs import UNREADABLE, RunArgument, fail, find_run, reading

NOT_TOLD = 4
"""Exit status where no answer could be given; that of `dsprof fix` where it is undecided."""


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="CODE[:RANK,...]",
            show_default=False,
            help="Take a finding's fault away, from all ranks that have it or from these alone.",
        ),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            "--scale",
            metavar="PART=FACTOR",
            show_default=False,
            help="link: so many times as fast; link.latency, link.bandwidth: times what it is; compute, data, "
            "optimizer, offload, pause, other: takes so many times as long.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="Turn a knob whose effect is predicted."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=A,B,C", show_default=False, help="A row for each value, beside all of the above."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            show_default=False,
            help="Of a pipeline: gpipe, 1f1b, interleaved, zero-bubble or dualpipe-v.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            metavar="N",
            min=1,
            show_default=False,
            help="Of a pipeline: so many a step, of the size that they have.",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            metavar="N",
            min=1,
            show_default=False,
            help="Of a pipeline: so many parts of the model on each rank, with an interleaved schedule.",
        ),
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(
            "--boundaries",
            metavar="auto|0,N,...",
            show_default=False,
            help="Of a pipeline: layers at which stages begin, and their number; auto: where the step is shortest.",
        ),
    ] = None,
    zero_stage: Annotated[
        int | None,
        typer.Option("--zero-stage", metavar="0-3", min=0, max=3, show_default=False, help="Another stage of ZeRO."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", min=1, show_default=False, help="So many tensor-parallel ranks.")
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option("--dp", metavar="N", min=1, show_default=False, help="So many replicas, each with its batch."),
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", min=1, show_default=False, help="So many pipeline stages.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute", metavar="full|none", show_default=False, help="Activations computed again in backward."
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload", metavar="none", show_default=False, help="Nothing in the host's memory between its uses."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The answers as JSON, on stdout.")] = False,
) -> int:
    """Say what changes would save, by a replay of the run's steps: each alone, and all together.

    The job is not run: `dsprof fix RUN --set KEY=VALUE --verify` measures a knob.

    The exit status is 4 if nothing could be predicted.
    """
    try:
        folder = find_run(run)
    except RunError as error:
        fail(error, UNREADABLE)
    from dsprof import reports
    from dsprof.knobs import KnobError
    from dsprof.knobs.layouts import read_layout
    from dsprof.knobs.questions import NotAnswered, answer_questions, read_questions, read_structure

    try:
        layout = read_layout(
            pp=pp, dp=dp, tp=tp, zero_stage=zero_stage, recompute=recompute, offload=offload, schedule=schedule,
            micro_batches=micro_batches, chunks=chunks, boundaries=boundaries,
        )  # fmt: skip
        structure = layout or read_structure(schedule, micro_batches, chunks, boundaries)
        questions = read_questions(without or (), scale or (), settings or (), sweep or (), str(run), structure)
    except KnobError as error:
        raise LaunchError(str(error)) from error
    try:
        with reading(folder):
            study = reports.measure(folder)
    except RunError as error:
        fail(error, UNREADABLE)
    try:
        answers = answer_questions(study, questions)
    except KnobError as error:
        raise LaunchError(str(error)) from error
    except NotAnswered as error:
        raise LaunchError(f"{folder.path}: {error}", status=NOT_TOLD) from error
    if as_json:
        print(json.dumps(answers.to_dict(), indent=1))
    else:
        from dsprof.reports.answers import render

        sys.stdout.write(render(answers))
    return 0 if any(row.gain is not None or row.memory for row in answers.rows) else NOT_TOLD
