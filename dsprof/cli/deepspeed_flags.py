"""The deepspeed launcher's own flags, as options of `dsprof run`: said in torchrun's words, or refused with what to
write instead. A test holds the list against that of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from dsprof.launch import LaunchError

PANEL: Final = "deepspeed launcher"

_NO_SSH: Final = "dsprof run starts the ranks of this machine and goes nowhere by ssh; leave it out"
_ON_EACH: Final = (
    "dsprof run starts the ranks of this machine; on each of several write --nnodes N --node-rank I --master-addr HOST "
    "--nproc-per-node GPUS"
)
_CHOOSE: Final = (
    "put CUDA_VISIBLE_DEVICES=0,1 (the GPUs to use) before dsprof run, which starts a rank for each; "
    "for other machines start it there"
)
_OF_SCRIPT: Final = "an argument of the script; write it after the script: dsprof run train.py {flag}"


@dataclass(frozen=True)
class DeepspeedFlag:
    """One flag of the launcher: `--num_gpus` is named `num_gpus`."""

    name: str
    metavar: str | None = None
    """None: a switch."""
    help: str = ""
    instead: str = ""
    """Of a flag that is refused: what to write."""
    more: tuple[str, ...] = ()
    """Other names of it."""

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


FLAGS: Final = (
    DeepspeedFlag("num_gpus", "N", "Ranks on this machine, as --nproc-per-node; hands the script --local_rank too.",
                  more=("--num-accelerators",)),
    DeepspeedFlag("num_nodes", "N", "Number of machines: 1, or see --nnodes."),
    DeepspeedFlag("no_local_rank", None, "Do not hand the script --local_rank."),
    DeepspeedFlag("hostfile", "FILE", instead=_ON_EACH, more=("-H",)),
    DeepspeedFlag("include", "HOST:GPUS", instead=_CHOOSE, more=("-i",)),
    DeepspeedFlag("exclude", "HOST:GPUS", instead=_CHOOSE, more=("-e",)),
    DeepspeedFlag("launcher", "NAME",
                  instead="torchrun starts the ranks here; for another launcher write dsprof run -- LAUNCHER ... "
                  "python train.py"),
    DeepspeedFlag("launcher_args", "ARGS",
                  instead="torchrun starts the ranks here, and takes its own flags; leave it out"),
    DeepspeedFlag("no_ssh", None, instead=_NO_SSH),
    DeepspeedFlag("no_ssh_check", None, instead=_NO_SSH),
    DeepspeedFlag("ssh_port", "PORT", instead=_NO_SSH),
    DeepspeedFlag("force_multi", None, instead=_NO_SSH),
    DeepspeedFlag("venv_script", "FILE",
                  instead="activate the environment before dsprof run, or call that environment's own"),
    DeepspeedFlag("save_pid", None, instead="run.json and exits/ in the run folder have the processes; leave it out"),
    DeepspeedFlag("enable_each_rank_log", "DIR", instead="write --log-dir DIR --redirects 3"),
    DeepspeedFlag("autotuning", "MODE", instead="try values one by one; each run says where its time went"),
    DeepspeedFlag("bind_cores_to_rank", None, instead="write --numa-binding node, or core-complex"),
    DeepspeedFlag("bind_core_list", "LIST", instead="put taskset -c LIST before dsprof run"),
    DeepspeedFlag("log_level", "LEVEL", instead="write -q, or nothing"),
    DeepspeedFlag("user_args", "ARGS", instead="write the script's arguments after the script"),
    DeepspeedFlag("deepspeed", None, instead=_OF_SCRIPT.format(flag="--deepspeed")),
    DeepspeedFlag("deepspeed_config", "FILE", instead=_OF_SCRIPT.format(flag="--deepspeed_config FILE")),
    DeepspeedFlag("local_rank", "N", instead="each rank has its own: write --num-gpus, which hands it to the script"),
)  # fmt: skip
"""All but those that torchrun has too, and -q, which is dsprof's."""


def parameters() -> Iterator[inspect.Parameter]:
    """The flags as keyword parameters for a Typer command: None where not given."""
    for flag in FLAGS:
        option = typer.Option(
            flag.option, *flag.more, help=flag.help, metavar=flag.metavar or "", rich_help_panel=PANEL,
            show_default=False, hidden=bool(flag.instead),
        )  # fmt: skip
        kind: Any = (bool if flag.metavar is None else str) | None
        yield inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )


def given(values: Mapping[str, Any]) -> list[DeepspeedFlag]:
    """Those that were given."""
    return [flag for flag in FLAGS if values.get(flag.name) not in (None, False)]


def to_torchruns(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same flags in torchrun's words. Raises LaunchError for one that cannot be said so."""
    for flag in given(values):
        if flag.instead:
            raise LaunchError(f"{flag.option}: {flag.instead}")
    said = {name: value for name, value in values.items() if name not in {flag.name for flag in FLAGS}}
    if values.get("num_nodes") not in (None, "-1", "1"):
        raise LaunchError(f"--num-nodes {values['num_nodes']}: {_ON_EACH}")
    ranks = values.get("num_gpus")
    if ranks not in (None, "-1"):  # which is all there are
        if not str(ranks).isdigit() or int(ranks) < 1:
            raise LaunchError(f"--num-gpus {ranks}: write a number of ranks, at least 1")
        if said.get("nproc_per_node") not in (None, ranks):
            raise LaunchError("--num-gpus and --nproc-per-node: write one of them")
        said["nproc_per_node"] = ranks
    return said


def hands_local_rank(values: Mapping[str, Any]) -> bool:
    """Whether scripts get `--local_rank`: who speaks that launcher's language gets what it does."""
    spoken = any(values.get(name) is not None for name in ("num_gpus", "num_nodes"))
    return spoken and not values.get("no_local_rank")
