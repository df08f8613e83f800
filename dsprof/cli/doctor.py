"""`dsprof doctor`: a configuration and the machine, checked before any GPU hour."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.doctor import GIB, Diagnosis, diagnose
from dsprof.launch import left_behind
from dsprof.launch.devices import visible_gpus
from dsprof.machine import Machine, inspect
from dsprof.redact import redact_data, redact_setting, redact_text

from .runs import USAGE, fail

if TYPE_CHECKING:
    from rich.console import Console

    from dsprof.engine.config import Config

WRONG: Final = 1
WIDTH: Final = 110
BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

Row = tuple[str, str, str]
"""Name, value, style."""


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", show_default=False, help="DeepSpeed's JSON. Without: the machine only."),
    ] = None,
    *,
    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="Ranks of the job. Default: visible GPUs, else 1."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check a configuration and this machine without training. Ends with 1 if the configuration has errors."""
    if config is not None and (config.is_dir() or not config.exists()):
        what = "is a folder" if config.is_dir() else "no such file"
        fail(f"{config}: {what}; name the JSON file of a configuration", USAGE)
    ranks = world_size or max(1, visible_gpus(os.environ))
    moved = tuple(left_behind.move_all(os.environ.get("DSPROF_SCRATCH", "")))
    diagnosis = replace(diagnose(config, ranks, inspect(os.environ)), moved=moved)
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2) + "\n")
    else:
        _print(diagnosis)
    if diagnosis.errors:
        raise typer.Exit(WRONG)


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = min(Console().width, WIDTH) if sys.stdout.isatty() else WIDTH
    console = Console(
        file=sys.stdout, width=width, color_system="auto" if color else None, force_terminal=color,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    with console.capture() as capture:
        _write(console, diagnosis)
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def _write(console: Console, diagnosis: Diagnosis) -> None:
    if diagnosis.config is not None:
        ranks = f"{diagnosis.world_size} {'rank' if diagnosis.world_size == 1 else 'ranks'}"
        console.print(f"{diagnosis.source}, for {ranks}", style="bold")
        _rows(console, _config(diagnosis.config, diagnosis.world_size))
        console.print()
    console.print("this machine", style="bold")
    _rows(console, _machine(diagnosis.machine))
    console.print()
    console.print("what a capture records here (--without NAME leaves a part out)", style="bold")
    _rows(console, _collectors(diagnosis.machine))
    console.print()
    about = "" if diagnosis.source is None else f"{diagnosis.source}: "
    said = [("error", f"{about}{redact_text(text)}", "bold red") for text in diagnosis.errors]
    said += [("warning", redact_text(text), "bold yellow") for text in diagnosis.warnings]
    said += [("capture", text, "bold") for text in diagnosis.moved]
    _rows(console, said or [("nothing to complain of", "", "bold green")], indent="", named=True)


def _rows(console: Console, rows: Iterable[Row], indent: str = "  ", named: bool = False) -> None:
    """A table without lines; the style is the value's, or the name's."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value, style in rows:
        grid.add_row(
            Text(f"{indent}{name}", style=style if named else "dim"), Text(value, style="" if named else style)
        )
    console.print(grid)


# --- the configuration --------------------------------------------------------------------------


def _config(config: Config, world_size: int) -> Iterator[Row]:
    """The batch, then every key with its value, bold where it is not the default; sections at their defaults last."""
    from dsprof.engine.config import Batch, replicas_of

    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    shares, sharing = config.shares(world_size), config.sequence_parallel_size
    if sharing > 1:
        sets = f"{replicas_of(config, world_size)} sets of {sharing} ranks"
        yield "batch", f"{sizes[0]} = {sizes[1]} a set x {sizes[2]} accumulated x {sets}", "bold"
    elif config.heterogeneous.speeds is None:
        yield "batch", str(Batch(*sizes, ranks=replicas_of(config, world_size))), "bold"
    elif config.heterogeneous.speeds == "measure":
        yield "batch", f"{sizes[0]}, divided by speeds that are measured at the start", "bold"
    else:
        yield "batch", f"{sizes[0]} = ({' + '.join(map(str, shares))}) x {sizes[2]} accumulated", "bold"
        yield "shares", ", ".join(f"replica {at}: {n / sum(shares):.1%}" for at, n in enumerate(shares)), ""
    memory = config.heterogeneous.memory
    if memory == "measure":
        yield "shards", "divided by memory that is measured at the start", "bold"
    elif memory is not None:
        parts = config.memory_of_ranks(world_size)
        holder = "replica" if sharing == 1 else "rank"  # ranks that share sequences hold shards of their own
        yield "shards", ", ".join(f"{holder} {at}: {n / sum(parts):.1%}" for at, n in enumerate(parts)), "bold"
    several = f"added up over {sizes[2]} micro-batches in {config.accumulation_type}, " if sizes[2] > 1 else ""
    yield "gradients", f"{several}summed over ranks in {config.communication_type}", ""
    values, usual = redact_data(config.model_dump(mode="json")), type(config)().model_dump(mode="json")
    top = {key: value for key, value in values.items() if not isinstance(value, dict) and key not in BATCH}
    yield from _keys(top, usual)
    silent = []
    for key, value in values.items():
        if isinstance(value, dict) and value == usual[key]:
            silent.append(key)
        elif isinstance(value, dict):
            yield key, "", ""
            yield from _keys(value, usual[key] or {}, indent="  ")
    yield "at their defaults", ", ".join(silent), ""


def _keys(values: Mapping[str, Any], usual: Mapping[str, Any], indent: str = "") -> Iterator[Row]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}", "", ""
            yield from _keys(value, usual.get(key) or {}, indent + "  ")
        elif value is not None:
            text = f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)
            yield f"{indent}{key}", text, "" if value == usual.get(key) else "bold"


# --- the machine --------------------------------------------------------------------------------


def _machine(machine: Machine) -> Iterator[Row]:
    for name, text in _facts(machine):
        yield name, text, ""


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    versions = machine.versions
    yield "python", versions["python"] or ""
    yield "torch", _torch(machine)
    yield "nvcc", versions["nvcc"] or "none"
    yield "DeepSpeed", versions["deepspeed"] or "none"
    yield "driver", f"{versions['driver']}, for CUDA {versions['driver cuda']}" if versions["driver"] else "none"
    yield from _gpus(machine)
    yield "NVML", machine.nvml or "answers: clocks, power and errors are known while a job runs"
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / GIB:.0f} GiB"
    yield "CPU", f"{machine.cpus} {'core' if machine.cpus == 1 else 'cores'}{memory}"
    for port in machine.ports:
        yield port.name, ", ".join(filter(None, (port.kind, "up" if port.up else "down", port.speed)))
    yield "ulimit", ", ".join(f"{name} {_limit(name, limit)}" for name, limit in machine.limits.items())
    if machine.shm_bytes is not None and machine.shm_free_bytes is not None:
        yield "/dev/shm", f"{machine.shm_free_bytes / GIB:.2f} GiB free of {machine.shm_bytes / GIB:.2f}"
    variables = [f"{name}={redact_setting(name, value)}" for name, value in machine.allocator.items()]
    yield "allocator", ", ".join(variables) or "defaults of torch and the C library"
    yield "C++ compiler", machine.compiler or "none"


def _collectors(machine: Machine) -> Iterator[Row]:
    for group, members in groupby(machine.collectors, lambda one: one.group):
        parts = list(members)
        alike = parts[0].lacks if len({one.lacks for one in parts}) == 1 else ""
        yield group, f"not here: {alike}" if alike else "", ""
        for one in parts:
            why = f"; not here: {one.lacks}" if one.lacks and not alike else ""
            yield f"  {one.name}", one.records + why, "dim" if one.lacks else ""


def _torch(machine: Machine) -> str:
    versions = machine.versions
    if versions["torch"] is None:
        return "none"
    cuda = f"for CUDA {versions['cuda']}" if versions["cuda"] else "without CUDA"
    return f"{versions['torch']}, built {cuda}" + (f", NCCL {versions['nccl']}" if versions["nccl"] else "")


def _gpus(machine: Machine) -> Iterator[tuple[str, str]]:
    if not machine.gpus:
        yield "GPUs", "none"
        return
    hidden = len(machine.gpus) - machine.visible_gpus
    yield "GPUs", f"{len(machine.gpus)}" + (f", {hidden} of them hidden by CUDA_VISIBLE_DEVICES" if hidden else "")
    for index, gpu in enumerate(machine.gpus):
        lanes = f", PCIe x{gpu.pcie_width}" if gpu.pcie_width else ""
        yield f"GPU {index}", f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB{lanes}"
    kinds = list(dict.fromkeys(machine.links.values()))
    for kind in kinds:
        pairs = "all" if len(kinds) == 1 else ", ".join(pair for pair, link in machine.links.items() if link == kind)
        yield "interconnect", f"{kind} between {pairs}"


def _limit(name: str, limit: int | None) -> str:
    if limit is None:
        return "unlimited"
    return f"{limit / 2**20:g} MiB" if name == "memlock" else f"{limit:,}"
