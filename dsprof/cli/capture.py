"""`dsprof capture`: turn the capture of a running job on and off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dsprof import control
from dsprof.run import RunError

from .runs import UNREADABLE, RunArgument, fail, find_run


def command(
    run: RunArgument,
    capture: Annotated[Literal["on", "off"], typer.Argument(metavar="on|off", help="Whether it captures.")],
) -> None:
    """Turn the capture of a job that runs on or off: each rank changes at the end of a step, within a second or so.

    It outdoes --steps, --delay and --duration. What was captured until then is kept.
    """
    try:
        folder = find_run(Path(run))
        info = folder.read_info()
    except RunError as error:
        fail(error, UNREADABLE)
    if info.ended:
        fail(f"{folder.path}: this job ended at {info.ended}; there is nothing to turn {capture}", UNREADABLE)
    try:
        control.turn(folder.control, capture)
    except OSError as error:
        fail(f"{folder.control}: cannot be written ({error.strerror})", UNREADABLE)
    print(f"{folder.path}: every rank turns its capture {capture} at the end of a step")
