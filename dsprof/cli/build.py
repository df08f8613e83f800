"""`dsprof build`: the native helper for an image whose jobs have no compiler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from dsprof.launch.talk import Talk

from .runs import USAGE, fail

FAILED: Final = 1


def command(
    *,
    torch_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            show_default=False,
            help="The torch that the job is to have, such as 2.13.0: an error if this Python imports another one.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            show_default=False,
            help="Where to put it, for DSPROF_NATIVE_PATH=DIR. Default: into the installed package, where that can be"
            " written, else into the user's cache; it is found in both.",
        ),
    ] = None,
) -> None:
    """Build the native helper for the torch and the Python that this command runs in, and print where it is.

    For images: build it where there is a C++ compiler, with the Python that
    the job will have. Jobs whose image has none find it there. Once built it
    is not built again.
    """
    from dsprof.collectors.native import build, places

    python, talk = Path(sys.executable), Talk()
    try:
        target = build.target_of(python)
    except build.NoHelper as error:
        fail(f"{error}; install torch first, or run the `dsprof build` of the job's Python", FAILED)
    there = target.torch_version
    if torch_version is not None and torch_version not in (there, there.partition("+")[0]):
        fail(
            f"--torch-version {torch_version}: {python} imports torch {there}, and a helper fits one torch only; run"
            f" the `dsprof build` of a Python that has torch {torch_version}, or install that one first",
            USAGE,
        )
    try:
        place = places.for_image(talk.warn) if output is None else Path(os.path.abspath(output))
        path = build.build_into(place, target, python, talk.warn, again=True)
    except (build.NoHelper, OSError) as error:
        fail(f"no native helper for torch {there}: {error}", FAILED)
    print(path)
    if output is not None:
        talk.warn(f"jobs find it with DSPROF_NATIVE_PATH={place}")
    if place != places.PACKAGE:
        places.usable(path, lambda why: talk.warn(f"warning: as it lies there, {why}"))
