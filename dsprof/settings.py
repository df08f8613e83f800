"""Settings of a run: command line > environment > [tool.dsprof] in the working directory's pyproject.toml > default."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from .ranges import (
    EXIT_WAIT,
    NEVER,
    parse_deep,
    parse_exit_wait,
    parse_hang_timeout,
    parse_ranks,
    parse_size,
    parse_steps,
)
from .run import DEFAULT_PARENT
from .schema import HANG_TIMEOUT
from .words import did_you_mean

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "level": ("light", "full"),
    "native": ("auto", "on", "off"),
    "engine": ("script", "dsprof"),
    "on_hang": ("report", "abort"),
}
VARIABLES: Final = {
    "level": "DSPROF_LEVEL",
    "dir": "DSPROF_DIR",
    "ranks": "DSPROF_RANKS",
    "native": "DSPROF_NATIVE",
    "steps": "DSPROF_STEPS",
    "delay": "DSPROF_DELAY",
    "duration": "DSPROF_DURATION",
    "deep": "DSPROF_DEEP",
    "limit": "DSPROF_LIMIT",
    "scratch": "DSPROF_SCRATCH",
    "exit_wait": "DSPROF_EXIT_WAIT",
    "without": "DSPROF_WITHOUT",
    "engine": "DSPROF_ENGINE",
    "hang_timeout": "DSPROF_HANG_TIMEOUT",
    "on_hang": "DSPROF_ON_HANG",
    "comm_kernels": "DSPROF_COMM_KERNELS",
}
NATIVE_WORDS: Final = {"0": "off", "false": "off", "no": "off", "1": "on", "true": "on", "yes": "on"}


def _seconds(text: str) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{text!r} is no number of seconds; write one, such as 30")
    return seconds


def _some_seconds(text: str) -> float:
    if text and _seconds(text) == 0:
        raise ValueError(f"{text!r} would capture nothing; write more seconds, such as 30")
    return _seconds(text)


def _collectors(text: str) -> object:
    from dsprof.collectors.catalogue import without

    return without(text) if text else None


def _deep(text: str) -> object:
    return parse_deep(text) if text not in ("", NEVER) else None


def _patterns(text: str) -> object:
    from dsprof.trace.kineto.names import comm_pattern

    return [comm_pattern(line) for line in text.splitlines()]


PARSERS: Final[dict[str, Callable[[str], object]]] = {
    "ranks": parse_ranks, "steps": parse_steps, "delay": _seconds, "duration": _some_seconds,
    "deep": _deep, "limit": parse_size, "exit_wait": parse_exit_wait, "without": _collectors,
    "hang_timeout": parse_hang_timeout, "comm_kernels": _patterns,
}  # fmt: skip
"""What reads a setting's text, and raises ValueError for one that it cannot."""


class SettingsError(Exception):
    """A setting is unknown or has a value it cannot have; the message says where and what to write instead."""


@dataclass(frozen=True)
class Settings:
    """What a run can be told. Field names are the keys of [tool.dsprof]."""

    level: str = "light"
    """How much is captured: light (always on), full (also every module, and the operations of a step)."""
    dir: str = DEFAULT_PARENT
    """Parent of run folders."""
    ranks: str = ""
    """Ranks to capture, such as `0,2-3`; empty: all."""
    steps: str = ""
    """Steps to capture, such as `20:50`: from the 20th on, before the 50th; empty: all."""
    delay: str = ""
    """Seconds after which the capture begins; empty: at once."""
    duration: str = ""
    """Seconds for which it lasts; empty: to the end."""
    deep: str = ""
    """A few steps that torch.profiler looks at, such as `20:23`; `never`: none. Empty: three, where a device is for
    much of its steps in phases that its host is still launching, unless `level` is given."""
    limit: str = "2GiB"
    """How large the capture of a rank may become."""
    scratch: str = ""
    """Local folder in which captures are written first, and from which they are copied into the run folder; `off`:
    none. Empty: TMPDIR or /tmp where the run folder lies on a network file system, else shared memory where it fits."""
    exit_wait: str = EXIT_WAIT
    """Seconds for which a rank waits at its end until its capture is copied; then a process beside it goes on."""
    native: str = "auto"
    """The native helper: auto (the recorder in Python where it cannot be built), on (an error instead), off."""
    report: bool = True
    """Write the HTML report and the TensorBoard files at the end."""
    engine: str = "script"
    """What trains: script (what the script imports), dsprof (our engine, where the script imports deepspeed)."""
    hang_timeout: str = HANG_TIMEOUT
    """Seconds without progress on any rank after which a job whose ranks wait for one is called hung; 0: never."""
    on_hang: str = "report"
    """What is done about it: report (say so, and wait on), abort (end the job, too)."""
    without: str = ""
    """Collectors that are left out, such as `nvml,host-sync`; `dsprof doctor` lists them."""
    comm_kernels: str = ""
    """Kernels of imported traces that communicate, beside those that are known: a pattern a line, or a list of them.
    Each is REGEX, or COLLECTIVE:REGEX such as `all_reduce:mine::ring_`."""


def load(
    given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """The settings of a run started in `folder`; None in `given` means not given. Raises SettingsError."""
    values = _from_pyproject((folder or Path()) / "pyproject.toml")
    for key, variable in VARIABLES.items():
        value = (environ or {}).get(variable, "")
        if value:
            value = NATIVE_WORDS.get(value.lower(), value) if key == "native" else value
            values[key] = _checked(key, value, variable)
    for key, value in (given or {}).items():
        if value is not None:
            values[key] = _checked(key, value, f"--{key.replace('_', '-')}")
    if values.get("level"):  # who says how much is captured does not get more
        values["deep"] = values.get("deep") or NEVER
    return Settings(**values)


def _from_pyproject(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file).get("tool", {}).get("dsprof", {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read ({error}); mend it, or run from another folder") from error
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: [tool.dsprof] must be a table of settings")
    known = [field.name for field in fields(Settings)]
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known, otherwise=f"; known are {', '.join(known)}", show=str)
            raise SettingsError(f"{path}: [tool.dsprof] has no setting {key!r}{hint}")
    return {key: _checked(key, value, f"{path}: [tool.dsprof] {key}") for key, value in table.items()}


def _checked(key: str, value: Any, where: str) -> Any:
    if key == "comm_kernels" and isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        value = "\n".join(value)
    wanted: type = bool if key == "report" else str
    if key in ("delay", "duration", "hang_timeout") and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, wanted):
        raise SettingsError(f"{where}: {value!r} is not a {'true or false' if wanted is bool else 'string'}")
    choices = CHOICES.get(key)
    if choices and value not in choices:
        raise SettingsError(f"{where}: {value!r} is not one of {', '.join(choices)}")
    parse = PARSERS.get(key)
    if parse is not None:
        try:
            parse(str(value))
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from error
    return value
