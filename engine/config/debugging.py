"""What a run reports about itself: `comms_logger`, `flops_profiler`, `tensorboard` and `csv_monitor`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from .model import Complaint, Section, Whole, shown

KINDS: Final = ("all_gather", "all_reduce", "all_to_all", "broadcast", "recv", "reduce_scatter", "send")
"""Communications of the engine."""

DEEPSPEED_KINDS: Final = {
    "all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all", "irecv": "recv", "isend": "send",
    "reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip
"""DeepSpeed's name -> ours, of those that it distinguishes by the function that was called."""


def _kinds(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return value
    names = tuple(DEEPSPEED_KINDS.get(name, name) for name in value)
    if wrong := next((name for name in names if name not in KINDS), None):
        raise Complaint(
            f"{shown(wrong)} is no communication of the engine; write some of {', '.join(map(shown, KINDS))}"
        )
    return names


CommunicationKinds = Annotated[tuple[str, ...], BeforeValidator(_kinds)]


class CommsLoggerConfig(Section):
    """Every communication with its size, time and bandwidth, reported by the engine's hooks: nothing is
    synchronized."""

    enabled: bool = False
    """Collect them, and print the table with `log_summary`."""

    verbose: bool = False
    """Print a line for each communication as it ends."""

    prof_all: bool = True
    """All kinds of communication; false: those in `prof_ops`."""

    prof_ops: CommunicationKinds = ()
    """Kinds to collect where `prof_all` is false: `all_gather`, `all_reduce`, `all_to_all`, `broadcast`, `recv`,
    `reduce_scatter`, `send`, or DeepSpeed's names of these."""


class FlopsProfilerConfig(Section):
    """Floating-point operations, parameters and time of each module, in one step."""

    enabled: bool = False
    """Profile a step and print the table."""

    profile_step: Whole = Field(default=1, ge=1)
    """The step that is timed, by the number of steps before it. Operations are counted in the one before it."""

    module_depth: Whole = Field(default=-1, ge=-1)
    """Depth of modules up to which the summary goes; -1: to the innermost."""

    top_modules: Whole = Field(default=1, ge=1)
    """Modules named at each depth of the summary."""

    detailed: bool = True
    """Print the table of all modules too."""

    output_file: str | None = None
    """Write to this file. Default: print."""


class CurvesConfig(Section):
    """Curves of a training, written by rank 0."""

    enabled: bool = False
    """Write them."""

    output_path: str = ""
    """Folder. Default: the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder in it for this job."""


class TensorBoardConfig(CurvesConfig):
    """Loss, learning rate, loss scale, and with `wall_clock_breakdown` times, as TensorBoard event files, against
    samples seen."""


class CsvMonitorConfig(CurvesConfig):
    """Loss, learning rate, loss scale, and with `wall_clock_breakdown` times, as CSV files, against samples seen."""
