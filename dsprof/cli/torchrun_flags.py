"""torchrun's flags, as options of `dsprof run`.

A static list, because asking torch itself would cost `dsprof --help` a second and a half; a test holds it against
the parser of the installed torch. A flag that an older torch lacks is passed on when given, and torchrun refuses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import typer

PANEL: Final = "torchrun"


@dataclass(frozen=True)
class TorchrunFlag:
    """One flag of torchrun: `--nproc-per-node` is named `nproc_per_node`."""

    name: str
    type: Any
    metavar: str | None
    help: str
    short: str | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


StartMethod = Literal["spawn", "fork", "forkserver"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]

FLAGS: Final = (
    TorchrunFlag("nproc_per_node", str, "N",
                 "Ranks on this machine: a number, gpu, cpu, auto. Else one a visible GPU, or 1."),
    TorchrunFlag("nnodes", str, "N|MIN:MAX", "Number of machines, or a range."),
    TorchrunFlag("node_rank", int, "N", "Rank of this machine (static rendezvous)."),
    TorchrunFlag("standalone", bool, None, "One machine, a free port. The default where no rendezvous flag is given."),
    TorchrunFlag("rdzv_backend", str, "NAME", "Rendezvous backend: static, c10d, etcd-v2."),
    TorchrunFlag("rdzv_endpoint", str, "HOST[:PORT]", "Where the rendezvous listens."),
    TorchrunFlag("rdzv_id", str, "ID", "The job's own id, the same on every machine."),
    TorchrunFlag("rdzv_conf", str, "K=V,...", "More rendezvous settings."),
    TorchrunFlag("master_addr", str, "HOST", "Address of rank 0's machine (static rendezvous)."),
    TorchrunFlag("master_port", int, "PORT", "Port there. torchrun's default: 29500."),
    TorchrunFlag("local_addr", str, "HOST", "Address of this machine."),
    TorchrunFlag("max_restarts", int, "N", "Restart the ranks up to N times when one fails."),
    TorchrunFlag("monitor_interval", float, "SECONDS", "How often torchrun looks at the ranks."),
    TorchrunFlag("shutdown_timeout", int, "SECONDS", "How long ranks may take to end before SIGKILL."),
    TorchrunFlag("signals_to_handle", str, "NAMES", "Signals passed on to the ranks, comma-separated."),
    TorchrunFlag("start_method", StartMethod, None, "How --run-path starts ranks."),
    TorchrunFlag("no_python", bool, None, "The script is a program of its own: start it without Python."),
    TorchrunFlag("run_path", bool, None, "Run the script inside the starting interpreter."),
    TorchrunFlag("role", str, "NAME", "Role of the ranks."),
    TorchrunFlag("log_dir", str, "DIR", "Where redirected and teed streams are written."),
    TorchrunFlag("redirects", str, "SPEC",
                 "Streams into files: 0 none, 1 stdout, 2 stderr, 3 both; or 0:3,1:1 by rank.", "-r"),
    TorchrunFlag("tee", str, "SPEC", "As --redirects, and to the console too.", "-t"),
    TorchrunFlag("local_ranks_filter", str, "RANKS", "Show only these local ranks' output."),
    TorchrunFlag("duplicate_stdout_filters", str, "WORDS", "Copy stdout lines with one of these words into a file."),
    TorchrunFlag("duplicate_stderr_filters", str, "WORDS", "The same for stderr."),
    TorchrunFlag("event_log_handler", str, "NAME", "torchrun's event log handler."),
    TorchrunFlag("logs_specs", str, "NAME", "torchrun's log plug-in."),
    TorchrunFlag("numa_binding", NumaBinding, None, "Bind ranks to the CPUs near their GPU."),
    TorchrunFlag("virtual_local_rank", bool, None, "Give every rank LOCAL_RANK 0 and one visible GPU."),
)  # fmt: skip
"""All but -m/--module, which ends dsprof's flags and names what to run."""


def parameters() -> Iterator[inspect.Parameter]:
    """The flags as keyword parameters for a Typer command: None where not given."""
    for flag in FLAGS:
        metavar = "" if flag.type is bool else flag.metavar  # Typer would write <bool>
        names = (flag.option,) if flag.short is None else (flag.option, flag.short)
        option = typer.Option(*names, help=flag.help, metavar=metavar, rich_help_panel=PANEL, show_default=False)
        kind: Any = flag.type | None
        annotation = Annotated[kind, option]
        yield inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """The flags that were given, as torchrun's parser reads them: `--name=value`, or `--name` for a switch."""
    arguments: list[str] = []
    for flag in FLAGS:
        value = values.get(flag.name)
        if value is True:
            arguments.append(flag.option)
        elif value is not None and value is not False:
            arguments.append(f"{flag.option}={value}")
    return arguments
