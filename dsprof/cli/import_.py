"""`dsprof import`: a trace of another tool as a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dsprof.launch.hints import one_line
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder
from dsprof.settings import load as load_settings

from .runs import UNREADABLE, USAGE, fail


def command(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACES...",
            help="Traces of one job, one a rank, and a run to join them to: files, folders, patterns "
            "('runs/*/rank*.json'), .tar, .tar.gz, .tgz.",
        ),
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
            metavar="PATTERN",
            show_default=False,
            help="Kernels of these names communicate, beside those of the libraries that are known: REGEX, or "
            "COLLECTIVE:REGEX such as all_reduce:mine::ring_. May be given several times.",
        ),
    ] = None,
    mapping: Annotated[
        str,
        typer.Option(
            "--mapping",
            metavar="FILE",
            show_default=False,
            help="Read Chrome traces of any tool by this mapping file, or by one that dsprof has: megascan, megatron.",
        ),
    ] = "",
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the HTML report and the TensorBoard files.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="End with findings.json as one line on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but warnings.")] = False,
) -> None:
    """Make a run folder of another tool's traces, for all other commands, print its path, and end with the verdict.

    So far: traces of torch.profiler (*.pt.trace.json and .pftrace, also
    gzipped, any number of ranks), Nsight Systems reports (nsys export --type
    sqlite), Chakra execution traces, what dsprof export wrote, straggler
    tables (Parquet) of the OSDI '25 what-if analysis,
    CUDA memory snapshots (torch.cuda.memory._dump_snapshot; a folder of one a
    rank), whose files are read without running anything in them, a folder of
    Flight Recorder dumps, JSON or pickles, one a rank, and Chrome traces of any
    tool by a mapping file (--mapping), that of MegaScan by itself. What several
    of these recorded of one job, beside a run of dsprof if you like, becomes
    one run.
    """
    from dsprof.importers import import_trace
    from dsprof.importers.lacks import contents_of, lacking
    from dsprof.launch.conclude import Conclusion
    from dsprof.launch.talk import Talk

    if output is not None:
        _free(output, force)
    settings = load_settings({}, os.environ)
    patterns = [*(comm_kernels or ()), *settings.comm_kernels.splitlines()]
    try:
        trace = import_trace(traces, patterns, mapping)
    except RunError as error:
        fail(error, UNREADABLE)
    except Exception as error:  # whatever a damaged file, or one that somebody made up, has us meet
        said = one_line(f"{type(error).__name__}: {error}")
        fail(f"{traces}: cannot be imported ({said}); its content may be damaged: record it again", UNREADABLE)
    from dsprof import trace as traces_of_runs

    contents = contents_of(trace)
    folder = RunFolder(Path(DEFAULT_PARENT) / trace.run.id if output is None else output)
    try:
        if force:
            folder.remove()
        traces_of_runs.save(folder, trace)
    except OSError as error:
        fail(f"{folder.path}: cannot be written ({error.strerror}); name another folder with -o", USAGE)
    talk = Talk(quiet)
    for warning in folder.read_info().warnings:
        talk.warn(f"warning: {warning}")
    ranks = _counted(len(trace.run.ranks), "rank")
    of_memory = trace.memory and not contents.steps
    what = f"the memory of {ranks}" if of_memory else f"{ranks}, {_counted(contents.steps, 'step')}"
    talk.say(f"imported {what}")
    for lack in lacking(contents):
        talk.say(str(lack))
    print(folder.path, flush=True)
    Conclusion(folder, talk, report=report and settings.report, as_json=as_json).judge()


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
