"""`dsprof import`: a trace of another tool as a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsprof.launch.hints import one_line
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder

from .runs import UNREADABLE, USAGE, fail


def command(
    traces: Annotated[
        Path, typer.Argument(metavar="TRACES", help="A trace, or the folder that holds one, or one of each rank.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="RUN",
            show_default=False,
            help=f"The run folder to make. Default: a new one in {DEFAULT_PARENT}/.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace RUN if it was imported, too.")] = False,
    comm_kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--comm-kernels",
            metavar="REGEX",
            show_default=False,
            help="Kernels of these names communicate, beside those of NCCL and RCCL. May be given several times.",
        ),
    ] = None,
) -> None:
    """Make a run folder of another tool's trace, for all other commands, and print its path.

    So far: traces of torch.profiler (*.pt.trace.json, also gzipped, any number
    of ranks), straggler tables (Parquet) of the OSDI '25 what-if analysis,
    CUDA memory snapshots (torch.cuda.memory._dump_snapshot; a folder of one a
    rank), whose files are read without running anything in them, and a folder
    of Flight Recorder dumps, JSON or pickles, one a rank.
    """
    from dsprof.importers import import_trace

    if output is not None:
        _free(output, force)
    try:
        trace = import_trace(traces, comm_kernels or ())
    except RunError as error:
        fail(error, UNREADABLE)
    except Exception as error:  # whatever a damaged file, or one that somebody made up, has us meet
        said = one_line(f"{type(error).__name__}: {error}")
        fail(f"{traces}: cannot be imported ({said}); its content may be damaged: record it again", UNREADABLE)
    from dsprof import trace as traces_of_runs

    folder = RunFolder(Path(DEFAULT_PARENT) / trace.run.id if output is None else output)
    try:
        if force:
            folder.remove()
        traces_of_runs.save(folder, trace)
    except OSError as error:
        fail(f"{folder.path}: cannot be written ({error.strerror}); name another folder with -o", USAGE)
    for warning in folder.read_info().warnings:
        print(f"[dsprof] warning: {warning}", file=sys.stderr)
    ranks = _counted(len(trace.run.ranks), "rank")
    numbers = (trace.read(rank, ("kind", "step")).query("kind == 'step'")["step"] for rank in trace.ranks)
    steps = len(set().union(*numbers))
    what = f"{ranks}, {_counted(steps, 'step')}" if steps or not trace.memory else f"the memory of {ranks}"
    print(f"[dsprof] imported {what}; next: dsprof report {folder.path}", file=sys.stderr)
    print(folder.path)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _free(output: Path, force: bool) -> None:
    """End with what is wrong if `output` cannot become this run."""
    folder = RunFolder(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir():
        fail(f"{output}: is a file; name a folder with -o", USAGE)
    if folder.capture.exists() or not folder.is_run():
        what = "holds a capture" if folder.capture.exists() else "exists and is no run"
        fail(f"{output}: {what}, which is never replaced; name another folder with -o", USAGE)
    if not force:
        fail(f"{output}: exists; name another folder with -o, or --force to replace it", USAGE)
