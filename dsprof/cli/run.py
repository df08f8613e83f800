"""`dsprof run`: train under the profiler, end with a verdict."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from dsprof import settings
from dsprof.launch import Job, Launch, LaunchError

from . import deepspeed_flags, torchrun_flags
from .split import MODULE_FLAGS

RENDEZVOUS: Final = (
    "nnodes", "node_rank", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port",
)  # fmt: skip
"""torchrun flags any of which means that the user has arranged the rendezvous."""


def _command(
    context: typer.Context,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT.py | -m MODULE | -- COMMAND [ARGS]...",
            help="What to run, and all that follows it as it is: a script or module, "
            "or after `--` any other launcher's command.",
            show_default=False,
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", show_default=False, help="Run folder. Default: a new one in dsprof-out."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace the run that lies in DIR.")] = False,
    level: Annotated[
        Literal["light", "full"] | None,
        typer.Option(
            "--level",
            show_default=False,
            help="How much is captured; full: also every module, MFU, tokens a second. Default: light",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="LIST", show_default=False, help="Capture only these ranks, such as 0,2-3."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="A:B",
            show_default=False,
            help="Capture only these optimizer steps, such as 20:50 (from 0).",
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="SECONDS", show_default=False, help="Begin to capture so much later."),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option("--duration", metavar="SECONDS", show_default=False, help="Capture for so long."),
    ] = None,
    deep: Annotated[
        str | None,
        typer.Option(
            "--deep",
            metavar="A:B",
            show_default=False,
            help="Look at these few steps with torch.profiler, such as 20:23; they count as profiled, not as ordinary. "
            "never: also not at three steps of a job whose GPU may be waiting for launches, as it does by itself.",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit", metavar="SIZE", show_default=False, help="How large a rank's capture may become. Default: 2GiB"
        ),
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch",
            metavar="DIR",
            show_default=False,
            help="Local folder in which captures are written first; off: none. Default: TMPDIR or /tmp where the run "
            "folder lies on a network file system, else shared memory where they fit.",
        ),
    ] = None,
    exit_wait: Annotated[
        str | None,
        typer.Option(
            "--exit-wait",
            metavar="SECONDS",
            show_default=False,
            help="How long a rank waits at its end until its capture is copied; then a process beside it goes on. "
            "Default: 5",
        ),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            "--without",
            metavar="NAMES",
            show_default=False,
            help="Collectors to leave out, such as nvml,host-sync. `dsprof doctor` lists them.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            show_default=False,
            help="Turn a knob without an edit of the job, such as ddp.bucket_cap_mb=50 or "
            "zero_optimization.reduce_bucket_size=5e7; may be given several times. `dsprof knobs` lists them.",
        ),
    ] = None,
    native: Annotated[
        Literal["auto", "on", "off"] | None,
        typer.Option("--native", show_default=False, help="The native helper. Default: auto, built if it can be."),
    ] = None,
    engine: Annotated[
        Literal["script", "dsprof"] | None,
        typer.Option(
            "--engine",
            show_default=False,
            help="What trains: what the script imports, or dsprof's own engine where it imports deepspeed. "
            "Default: script",
        ),
    ] = None,
    hang_timeout: Annotated[
        str | None,
        typer.Option(
            "--hang-timeout",
            metavar="SECONDS",
            show_default=False,
            help="Call the job hung when ranks wait for one and none of all makes progress for so long; 0: never. "
            "Default: 600",
        ),
    ] = None,
    on_hang: Annotated[
        Literal["report", "abort"] | None,
        typer.Option(
            "--on-hang",
            show_default=False,
            help="Of a hung job: say which rank it waits for and wait on, or end it, too. Default: report",
        ),
    ] = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", metavar="", help="No HTML report and no TensorBoard files.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="End with findings.json as one line on stderr, not with the verdict."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Say nothing but warnings.")] = False,
    **flags: Any,
) -> int:
    """Train under the profiler, and end with a verdict on why the job is as slow as it is.

    `dsprof run train.py` is `python train.py`, watched: one process.
    A flag of torchrun's (--nproc-per-node 8) makes it torchrun.
    One of the deepspeed launcher's (--num-gpus 8), or --engine dsprof, makes
    it that launcher.

    dsprof's flags end at the script. The exit status is the job's own: that of the first rank to fail.
    """
    report = False if no_report else None
    given = {"level": level, "ranks": ranks, "native": native, "report": report, "engine": engine}
    given |= {"steps": steps, "delay": delay, "duration": duration, "deep": deep, "limit": limit, "scratch": scratch}
    given |= {"exit_wait": exit_wait, "without": without, "hang_timeout": hang_timeout, "on_hang": on_hang}
    chosen = settings.load(given, os.environ)
    check_ranks(flags)
    what = read_job(job or [], no_python=bool(flags["no_python"]))
    what = replace(what, on_our_engine=chosen.engine == "dsprof")
    if what.is_command:
        refuse_flags(flags)
    elif wants_ranks(flags, chosen):
        local_rank = deepspeed_flags.hands_local_rank(flags)
        flags = with_defaults(deepspeed_flags.to_torchruns(flags), os.environ)
        arguments = tuple(torchrun_flags.to_arguments(flags))
        ranks_there_will_be = expected_ranks(flags, os.environ)
        what = replace(what, torchrun_flags=arguments, world_size=ranks_there_will_be, local_rank=local_rank)
        what = replace(what, nnodes=several_hosts(flags, os.environ), elastic=is_elastic(flags, os.environ))
    return Launch(
        what,
        chosen,
        output=output,
        force=force,
        quiet=quiet,
        as_json=as_json,
        typed=("dsprof", *context.obj),
        own_flags=tuple(own_flags(given, output, quiet=quiet, as_json=as_json, changes=changes)),
        knobs=read_changes(changes),
    ).run()


def command(*args: Any, **kwargs: Any) -> int:
    return _command(*args, **kwargs)


def _signature() -> inspect.Signature:
    """That of `_command`, with torchrun's and the deepspeed launcher's flags in the place of `**flags`."""
    own = inspect.signature(_command, eval_str=True)
    kept = [item for item in own.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*kept, *torchrun_flags.parameters(), *deepspeed_flags.parameters()])


command.__doc__ = _command.__doc__
command.__signature__ = _signature()  # type: ignore[attr-defined]


def read_job(words: list[str], *, no_python: bool = False) -> Job:
    """What to run, from the words that follow dsprof's flags, a `--` before them included. Raises LaunchError."""
    separated = words[:1] == ["--"]
    if separated:
        words = words[1:]
    if not words:
        raise LaunchError("nothing to run: give a script (train.py), -m and a module, or -- and a command")
    first = words[0]
    if first in MODULE_FLAGS:
        return Job(("-m", *words[1:]))
    if first.startswith("-m"):
        return Job(("-m", first[2:], *words[1:]))
    if first.endswith(".py") or no_python:
        return Job(tuple(words), is_program=no_python)
    if separated:
        return Job(tuple(words), is_command=True)
    raise LaunchError(f"{first}: not a script (.py); to run a command, write -- before it: dsprof run -- {first} ...")


def wants_ranks(flags: Mapping[str, Any], chosen: settings.Settings) -> bool:
    """Whether a launcher is to start ranks. What PET_<FLAG> variables say is for torchrun, once it is asked for."""
    asked = torchrun_flags.to_arguments(flags) or deepspeed_flags.given(flags)
    return bool(asked) or chosen.engine == "dsprof"


def check_ranks(flags: Mapping[str, Any]) -> None:
    """Raises LaunchError if the value of --nproc-per-node can be none, as where it was left out."""
    value = flags.get("nproc_per_node")
    if value is not None and not (value.isalpha() or (value.isdecimal() and int(value) > 0)):
        raise LaunchError(f"--nproc-per-node {value}: write a number of ranks, at least 1, or gpu, cpu or auto")


def read_changes(words: list[str] | None) -> dict[str, Any]:
    """What --set asks for, by key. Raises LaunchError."""
    if not words:
        return {}
    from dsprof.knobs import KnobError, parse_settings

    try:
        return parse_settings(words)
    except KnobError as error:
        raise LaunchError(str(error)) from error


def own_flags(
    given: Mapping[str, Any], output: Path | None, *, quiet: bool, as_json: bool, changes: list[str] | None
) -> Iterator[str]:
    """dsprof's own flags, as one would type them to run again: the run folder is there now."""
    if output is not None:
        yield from ("-o", str(output), "--force")
    for change in changes or ():
        yield from ("--set", change)
    of_text = "level ranks steps delay duration deep limit scratch exit_wait without native engine hang_timeout on_hang"
    for name in of_text.split():
        if given[name] is not None:
            yield from (f"--{name.replace('_', '-')}", given[name])
    if given["report"] is False:
        yield "--no-report"
    if as_json:
        yield "--json"
    if quiet:
        yield "-q"


def refuse_flags(flags: Mapping[str, Any]) -> None:
    """Raises LaunchError if a flag of a launcher was given for a command that brings its own."""
    arguments = torchrun_flags.to_arguments(flags)
    if arguments:
        name = arguments[0].partition("=")[0]
        raise LaunchError(f"{name}: a flag of torchrun, which a command after -- does not use; put it into the command")
    for flag in deepspeed_flags.given(flags):
        raise LaunchError(
            f"{flag.option}: a flag of the deepspeed launcher, which a command after -- does not use; put it into the "
            "command"
        )


def with_defaults(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """torchrun's flags with ours for what was not given: a rank per visible GPU, and a port of its own.

    torchrun reads PET_<FLAG> from the environment; what is set there counts as given.
    """

    def given(name: str) -> bool:
        return flags.get(name) not in (None, False) or f"PET_{name.upper()}" in environ

    filled = dict(flags)
    if not given("nproc_per_node"):
        from dsprof.launch.devices import visible_gpus

        filled["nproc_per_node"] = str(visible_gpus(environ) or 1)
    # Without it, an older torchrun takes port 29500, and two jobs on one machine fight over it.
    if not any(given(name) for name in RENDEZVOUS):
        filled["standalone"] = True
    return filled


def several_hosts(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The number of hosts, or its range, where there may be more than one; else empty."""
    nnodes = str(flags.get("nnodes") or environ.get("PET_NNODES") or "1")
    low, _, high = nnodes.partition(":")
    return nnodes if (high or low).isdigit() and int(high or low) > 1 else ""


def is_elastic(flags: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    return (flags.get("rdzv_backend") or environ.get("PET_RDZV_BACKEND") or "static") != "static"


def expected_ranks(flags: Mapping[str, Any], environ: Mapping[str, str]) -> int | None:
    """World size where the flags fix it."""
    low, _, high = (flags.get("nnodes") or "1").partition(":")
    ranks = flags.get("nproc_per_node") or ""
    if not (low.isdigit() and ranks.isdigit()) or high not in ("", low) or "PET_NNODES" in environ:
        return None
    return int(low) * int(ranks)
