"""`dsprof plan`: how fast a job would be on other ranks, before it is run there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsprof.launch import LaunchError


def command(
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
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The answer as JSON, on stdout.")] = False,
) -> int:
    """Say how long training steps would take on other ranks, with intervals.

    From a table of measured steps one model of few figures is learnt, each readable as a figure of the hardware.
    """
    from dsprof.plan.table import TableError, read_table
    from dsprof.plan.told import from_table

    if calibrate is None:
        raise LaunchError("nothing to plan from; give --calibrate TABLE, a CSV of measured steps")
    try:
        learnt = read_table(calibrate)
        asked = None if predict is None else read_table(predict, timed=False)
    except TableError as error:
        raise LaunchError(str(error)) from error
    told = from_table(learnt, asked)
    if as_json:
        print(json.dumps(told.to_dict(), indent=1))
    else:
        from dsprof.reports.plans import render_calibration

        sys.stdout.write(render_calibration(told))
    return 0
