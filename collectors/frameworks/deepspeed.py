"""DeepSpeed's engine: what it does around the autograd engine and the optimizer, and what its pipelines execute.

Its backward goes on when the autograd engine is done (it reduces gradients), and its step clips, updates and gathers
what was updated: these phases take the place of the inner ones, as those of dsprof's own engine do.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from dsprof.ondisk import LARGEST_PLACE
from dsprof.schema import OVERFLOW, SHARDING, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..communication.purposes import for_purpose, in_context
from ..hooking import private
from ..hooking.errors import count_error
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.late_imports import Hook, when_imported
from ..hooking.timed import timed, timed_by_arguments
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from ..loop import optimizers, phases
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..recorder.record import Recorder

ENGINE: Final = "deepspeed.runtime.engine"
STAGE_3: Final = "deepspeed.runtime.zero.parameter_offload"
AROUND_MODULE: Final = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
"""Methods of its DeepSpeedZeRoOffload: stage 3 fetches and releases the parameters of a module in them."""
STAGES_1_AND_2: Final = "deepspeed.runtime.zero.stage_1_and_2"
OF_BUCKET: Final = "reduce_ipg_grads"
"""Method of its DeepSpeedZeroOptimizer: stages 1 and 2 reduce a bucket of gradients in it."""
PIPELINES: Final = {
    "deepspeed.runtime.pipe.engine": "PipelineEngine",
    "deepspeed.runtime.pipe.dualpipev": "DualPipeVEngine",
}
"""Module -> the class in it that executes a schedule."""
ACTIONS: Final = {"ForwardPass": "F", "BackwardPass": "B"}
"""Instruction -> the name of its `pipe` rows."""
PURPOSES: Final = {
    "SendActivation": "pipeline",
    "RecvActivation": "pipeline",
    "SendGrad": "pipeline",
    "RecvGrad": "pipeline",
    "CommitP2P": "pipeline",
    "ReduceGrads": "gradient",
    "ReduceTiedGrads": "gradient",
}
"""Instruction -> what it communicates for."""
FORWARD_ONLY: Final = "InferenceSchedule"
OF_MICRO_BATCHES: Final = ("LoadMicroBatch", *ACTIONS, "SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
"""Instructions that a schedule has once for each micro-batch, in their order."""

Wrap = Callable[[Any], Any]


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record what DeepSpeed's engines do from now on; each of their steps ends a training step."""
    recorder, on_step, positions = capture.recorder, capture.step_ended, _Positions()
    hooks: dict[str, Hook] = {
        ENGINE: functools.partial(_watch_engine, recorder, on_step),
        STAGE_3: functools.partial(_watch_stage_3, recorder),
        STAGES_1_AND_2: functools.partial(_watch_buckets, recorder),
        **{module: functools.partial(_watch_pipeline, recorder, positions, name) for module, name in PIPELINES.items()},
    }
    parts = [
        HookPart(
            f"what {module} does is not recorded",
            functools.partial(when_imported, module, hook),
            decisive=module == ENGINE,
        )
        for module, hook in hooks.items()
    ]
    return install_each("deepspeed", parts)


# --- the engine


def _watch_engine(recorder: Recorder, on_step: Callable[[], None], module: ModuleType) -> Uninstall:
    engine: Any = getattr(module, "DeepSpeedEngine", None)
    wraps: dict[str, Wrap] = {
        "backward": _backward,
        "_take_model_step": functools.partial(_step, recorder, on_step),
        "allreduce_gradients": functools.partial(for_purpose, recorder, "gradient"),
    }
    private.find(f"{ENGINE}:DeepSpeedEngine._take_model_step")  # tells what is lost without
    return in_reverse(
        replace_attribute(engine, name, wrap(getattr(engine, name)))
        for name, wrap in wraps.items()
        if name in getattr(engine, "__dict__", ())
    )


def _watch_stage_3(recorder: Recorder, module: ModuleType) -> Uninstall:
    """Record what stage 3 works for the parameters of a module, apart from what the module computes."""
    return _record_sharding(recorder, f"{STAGE_3}:DeepSpeedZeRoOffload", AROUND_MODULE)


def _watch_buckets(recorder: Recorder, module: ModuleType) -> Uninstall:
    """Record what stages 1 and 2 work for a bucket of gradients."""
    return _record_sharding(recorder, f"{STAGES_1_AND_2}:DeepSpeedZeroOptimizer", (OF_BUCKET,))


def _record_sharding(recorder: Recorder, path: str, methods: tuple[str, ...]) -> Uninstall:
    """Record these methods of a class as `module` rows named SHARDING, as those of FSDP2's units are."""
    owner = private.find(path)
    there = [name for name in methods if owner is not None and private.find(f"{path}.{name}") is not None]
    begin = functools.partial(recorder.begin, int(Kind.MODULE), recorder.intern(SHARDING))
    return in_reverse(
        replace_attribute(owner, name, timed(getattr(owner, name), begin, recorder.end, "DeepSpeed's ZeRO"))
        for name in there
    )


def _backward(original: Any) -> Any:
    return timed(original, phases.enter_backward, phases.leave_backward, "DeepSpeed")


def _step(recorder: Recorder, on_step: Callable[[], None], original: Any) -> Any:
    """The update at the boundary of accumulation; `step` itself is called for every micro-batch."""
    name, stated = recorder.intern("optimizer"), [False]

    overflow = recorder.intern(OVERFLOW)

    def enter(engine: Any) -> int:
        """The handle of its record."""
        try:
            if not stated[0]:
                stated[0] = True
                facts.state(_describe(engine))
                group = _tensor_parallel_group(engine)
                if group is not None:
                    facts.state({"fact": "tensor_parallel", "group": group})
            number = optimizers.number_of(engine.optimizer)
            return recorder.begin(Kind.PHASE, name, -1, number)
        except Exception as error:
            recorder.count_error("DeepSpeed", error)
            return 0

    def begin(args: tuple[Any, ...], _: dict[str, Any]) -> tuple[int, Any, int | None]:
        optimizers.enter_engine_step()
        return enter(args[0]), args[0], getattr(args[0], "skipped_steps", None)

    def end(begun: tuple[int, Any, int | None]) -> None:
        handle, engine, skipped = begun
        try:
            if skipped is not None and getattr(engine, "skipped_steps", skipped) != skipped:
                recorder.mark(int(Kind.MARK), overflow, _loss_scale(engine))
        except Exception as error:
            recorder.count_error("DeepSpeed", error)
        recorder.end(handle)
        optimizers.leave_engine_step()
        on_step()

    return timed_by_arguments(original, begin, end, "DeepSpeed")


def _loss_scale(engine: Any) -> float | None:
    """What the loss is multiplied by from now on; a plain number of the host's."""
    scale = getattr(getattr(engine, "optimizer", None), "cur_scale", None)
    return float(scale) if isinstance(scale, (int, float)) else None


def _describe(engine: Any) -> facts.Fact:
    def asked(name: str) -> Any:
        try:
            return getattr(engine, name)()
        except Exception:  # another version of DeepSpeed
            return None

    return {
        "fact": "deepspeed",
        "zero_stage": asked("zero_optimization_stage"),
        "micro_batch": asked("train_micro_batch_size_per_gpu"),
        "accumulation": asked("gradient_accumulation_steps"),
        "clipping": asked("gradient_clipping"),
        "reduce_bucket_size": asked("zero_reduce_bucket_size"),
        "allgather_bucket_size": asked("zero_allgather_bucket_size"),
        "prefetch_bucket_size": asked("zero_prefetch_bucket_size"),
        "gradient_dtype": _gradient_dtype(engine),
    }


def _gradient_dtype(engine: Any) -> str | None:
    """In which gradients are reduced, as torch calls it."""
    try:
        return str(engine.communication_data_type).removeprefix("torch.")
    except Exception:  # another version of DeepSpeed
        return None


def _tensor_parallel_group(engine: Any) -> str | None:
    """Name of the process group that AutoTP communicates in."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    try:
        return str(groups.get_tensor_model_parallel_group().group_name) if engine.autotp_size() > 1 else None
    except Exception:  # another version of DeepSpeed
        return None


# --- pipelines


class _Positions:
    """Where each pipeline engine is in its schedule."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, Counter[tuple[str, int]]] = WeakKeyDictionary()

    def begin(self, engine: Any) -> None:
        self._counts[engine] = Counter()

    def microbatch(self, engine: Any, instruction: str, phase: int) -> int:
        """The number of the micro-batch that it now executes this instruction for; -1: of none."""
        counts = self._counts.get(engine)
        if counts is None or instruction not in OF_MICRO_BATCHES:
            return -1
        counts[instruction, phase] += 1
        return min(counts[instruction, phase] - 1, LARGEST_PLACE)


def _watch_pipeline(recorder: Recorder, positions: _Positions, name: str, module: ModuleType) -> Uninstall:
    engine: Any = getattr(module, name, None)
    table = private.find(f"{module.__name__}:{name}._INSTRUCTION_MAP")
    if not isinstance(table, dict):
        return lambda: None
    undo = [_watch_instruction(recorder, positions, table, instruction) for instruction in list(table)]
    if private.known(path := f"{module.__name__}:{name}._exec_schedule") and private.find(path) is not None:
        # DualPipeV inherits it.
        undo.append(replace_attribute(engine, "_exec_schedule", _schedule(positions, engine._exec_schedule)))
    return in_reverse(undo)


def _schedule(positions: _Positions, original: Any) -> Any:
    described: set[tuple[int, type]] = set()

    @stands_for(original)
    def exec_schedule(self: Any, pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            positions.begin(self)
            described_as = id(self), type(pipe_schedule)  # it evaluates with another one
            if described_as not in described:
                described.add(described_as)
                facts.state(_describe_schedule(self, pipe_schedule))
        except Exception as error:
            count_error("DeepSpeed's schedule", error)
        return original(self, pipe_schedule, *args, **kwargs)

    return exec_schedule


def _describe_schedule(engine: Any, schedule: Any) -> facts.Fact:
    stages = [int(engine.stage_id)]
    if hasattr(engine, "_active_phase"):  # DualPipeV: each rank has a stage of the way there and one of the way back
        stages.append(2 * int(engine.num_stages) - 1 - stages[0])
    return {
        "fact": "pipeline",
        "schedule": type(schedule).__name__,
        "microbatches": int(engine.micro_batches),
        "stages": int(engine.num_stages) * len(stages),
        "stage_indices": stages,
        "trains": type(schedule).__name__ != FORWARD_ONLY,
        "site": None,
        "framework": "deepspeed",
    }


def _watch_instruction(recorder: Recorder, positions: _Positions, table: dict[Any, Any], instruction: Any) -> Uninstall:
    original, name = table[instruction], str(instruction.__name__)
    if getattr(original, "_dsprof", False):  # DualPipeV's table begins as a copy of the other one
        return lambda: None
    purpose = recorder.intern(PURPOSES[name]) if name in PURPOSES else 0
    action = recorder.intern(ACTIONS[name]) if name in ACTIONS else 0

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Of the action's record."""
        try:
            engine, phase = args[0], kwargs.get("phase", 0)
            stage = int(engine.stage_id)
            if phase == 1:
                stage = 2 * int(engine.num_stages) - 1 - stage
            place = min(stage, LARGEST_PLACE), positions.microbatch(engine, name, phase)
            now = now_ns()
            handle = recorder.span(int(Kind.PIPE), action, now, 0, 0, None, -1, 0, 0, *place, 0, 0) if action else 0
            recorder.set_context(recorder.make_context(*place, 0, purpose))
            return handle
        except Exception as error:
            recorder.count_error("DeepSpeed", error)
            return 0

    execute: Any = in_context(recorder, original, enter)
    execute._dsprof = True
    table[instruction] = execute

    def uninstall() -> None:
        if table.get(instruction) is execute:
            table[instruction] = original

    return uninstall
