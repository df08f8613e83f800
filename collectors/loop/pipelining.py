"""torch.distributed.pipelining: what a rank computes for each stage and micro-batch, and the schedule's facts.

`F`, `B` and `W` as in the engine's own pipelines: the forward, the backward, and, in schedules that split it, the part
of the backward that only makes the weights' gradients (`B` is then the part that makes the input's).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.ondisk import LARGEST_PLACE
from dsprof.schema import Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import private
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.late_imports import when_imported
from ..hooking.timed import timed_by_arguments
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..recorder.record import Recorder

CHUNKS: Final = {
    "forward_one_chunk": ("F", "fwd_chunk_id"),
    "backward_one_chunk": ("B", "bwd_chunk_id"),
    "backward_weight_one_chunk": ("W", "bwd_chunk_id"),
}
"""Method of a stage -> the name of its rows, and the parameter that is the number of the micro-batch."""

SCHEDULES: Final = ("PipelineScheduleSingle", "PipelineScheduleMulti")
"""The classes that have the others' stages."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record the actions of pipeline stages, and state what the schedules are, once they are imported."""
    package = "torch.distributed.pipelining"
    stages, schedules = functools.partial(_watch_stages, capture.recorder), _watch_schedules
    parts = (
        HookPart(
            "the micro-batches of torch's pipelines are not recorded",
            lambda: when_imported(f"{package}.stage", stages),
            decisive=True,
        ),
        HookPart(
            "how torch's pipelines are set up is not known", lambda: when_imported(f"{package}.schedules", schedules)
        ),
    )
    return install_each("pipelining", parts)


def _watch_stages(recorder: Recorder, module: ModuleType) -> Uninstall:
    base = f"{module.__name__}:_PipelineStageBase"
    stage = private.need(base)
    return in_reverse(
        _watch_chunks(recorder, stage, method, recorder.intern(name), parameter)
        for method, (name, parameter) in CHUNKS.items()
        if private.find(f"{base}.{method}") is not None
    )


def _watch_chunks(recorder: Recorder, stage: Any, method: str, name: int, parameter: str) -> Uninstall:
    kind = int(Kind.PIPE)

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        start_ns = now_ns()
        of, *rest = args
        number, microbatch = int(of.stage_index), int(rest[0] if rest else kwargs[parameter])
        place = min(number, LARGEST_PLACE), min(microbatch, LARGEST_PLACE)
        return recorder.span(kind, name, start_ns, 0, 0, None, -1, 0, 0, *place, 0, 0), start_ns

    def end(begun: tuple[int, int]) -> None:
        handle, start_ns = begun
        recorder.span_end(handle, start_ns, now_ns(), -1)

    one_chunk = timed_by_arguments(getattr(stage, method), begin, end, "a pipeline's action")
    return replace_attribute(stage, method, one_chunk)


def _parameters(stages: Sequence[Any]) -> facts.Fact:
    """How many tensors the parameters of this rank's stages are, their bytes, and how many are not trained."""
    modules = [stage.submod for stage in stages if getattr(stage, "submod", None) is not None]
    if len(modules) < len(stages):
        return {}
    every = {id(param): param for module in modules for param in module.parameters()}.values()
    frozen = sum(not param.requires_grad for param in every)
    return {"tensors": len(every), "bytes": sum(param.nbytes for param in every), "frozen": frozen}


def _watch_schedules(module: ModuleType) -> Uninstall:
    """State the settings of every schedule made from now on."""

    def describe(schedule: Any) -> facts.Fact:
        single = isinstance(schedule, getattr(module, SCHEDULES[0], ()))
        stages = [schedule._stage] if single else schedule._stages
        return {
            "fact": "pipeline",
            "schedule": type(schedule).__name__,
            "microbatches": schedule._n_microbatches,
            "stages": schedule._num_stages,
            "stage_indices": [stage.stage_index for stage in stages],
            "trains": bool(schedule._has_backward),
            **_parameters(stages),
        }

    for name in SCHEDULES:
        if hasattr(module, name):
            facts.after_init(getattr(module, name), describe)
    return lambda: None
