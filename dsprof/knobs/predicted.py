"""The knobs that have a what-if: what a value of each would change in the steps of a run.

Apart from the records, as this takes the analyzer, and `dsprof run --set` does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from dsprof.analyzer.align.groups import PARAMETER
from dsprof.analyzer.ask import Request, Turned, Without
from dsprof.analyzer.budget.activity import BUFFER
from dsprof.analyzer.effect import Effect
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.comm.ddp_buckets import with_cap
from dsprof.analyzer.rules.comm.deepspeed_config import need_configuration
from dsprof.analyzer.rules.comm.dimensions import GRADIENT
from dsprof.analyzer.rules.comm.fetched_parameters import with_live_parameters, with_prefetch_bucket
from dsprof.analyzer.rules.comm.fsdp_settings import with_prefetch, with_reshard
from dsprof.analyzer.rules.comm.one_bit import with_freeze_step, with_optimizer
from dsprof.analyzer.rules.comm.quantized import with_quantized
from dsprof.analyzer.rules.comm.redundant_reduce import repeated_reductions
from dsprof.analyzer.rules.comm.shards import need_fully_shard, with_modules_per_unit
from dsprof.analyzer.rules.comm.volume import with_short_gradients, with_short_shards
from dsprof.analyzer.rules.comm.zero_buckets import with_bucket_size
from dsprof.analyzer.rules.comm.zero_stage import with_overlap, with_stage
from dsprof.analyzer.rules.compute.float8 import with_float8
from dsprof.analyzer.rules.compute.host_sync import CHECK_KEY
from dsprof.analyzer.rules.compute.overflow_check import with_overflow_check
from dsprof.analyzer.rules.data.sequence import with_order
from dsprof.analyzer.rules.memory.offload_knobs import with_offload
from dsprof.analyzer.rules.run.unequal_shares import with_speeds
from dsprof.analyzer.study import Study
from dsprof.redact import redact_words

from .knob import KnobError
from .loader_whatifs import AHEAD, STAY, WORKERS, with_batches_ahead, with_workers, with_workers_that_stay
from .memory import has_memory
from .registry import FACT_OF, find, typed
from .structures import STRUCTURES

OF_PIPELINES: Final = ("pipeline.", "pipelining.")
HALF: Final = ("bf16", "fp16", "bfloat16", "float16")
NO_BF16_HOOK: Final = (
    "torch takes its hook for bfloat16 only where it is built with CUDA and NCCL, or XPU and XCCL; fp16 is always taken"
)
NO_HALF: Final = f"numbers of half the size are predicted, {' or '.join(HALF)}, and not {{}}"
OPTIMIZER: Final = "optimizer.type"
FREEZE_STEP: Final = "optimizer.params.freeze_step"
GRADIENTS_IN: Final = {"fsdp2.param_dtype": "fsdp2.reduce_dtype", "bf16.enabled": "communication_data_type"}
"""What layers compute in -> what their gradients travel in, which is the same where a job does not say it."""


def _bucket_size(study: Study, value: Any) -> Effect:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise NotJudged(f"{value} is no number of elements")
    return with_bucket_size(study, float(value))


def _freeze(study: Study, value: Any) -> Effect:
    if not value:
        raise NotJudged("it is what a job does that never freezes; ask with gc.freeze=true")
    return Without("pause.gc").effect(study)


def _accumulate(study: Study, value: Any) -> Effect:
    found = repeated_reductions(study)
    if found is None:
        raise NotJudged("no gradients are reduced more than once for one step of the optimizer")
    if value != found.backwards:
        raise NotJudged(
            f"the optimizer steps after {found.backwards} backwards that reduce; with another number than "
            f"{found.backwards} the job would not train as it does"
        )
    return Without("comm.redundant-reduce").effect(study)


def _broadcast(study: Study, value: Any) -> Effect:
    if value:
        raise NotJudged("what broadcasting buffers takes is only told by a job that does it")
    if not (study.collectives["purpose"] == BUFFER).any():
        raise NotJudged("no buffers are broadcast in this run")
    return Without("comm.buffers").effect(study)


def _comm_hook(study: Study, value: Any) -> Effect:
    if value not in HALF:
        raise NotJudged(NO_HALF.format(value))
    if not study.facts.get("ddp"):
        raise NotJudged("no DistributedDataParallel was seen in this run")
    effect = with_short_gradients(study)
    if value == "bf16" and not study.on_gpu:
        effect = replace(effect, notes=(*effect.notes, NO_BF16_HOOK))
    return effect


def _computes_in(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """Parameters in numbers of half the size, and with them gradients, unless these are to travel in others."""
    if value is False:
        raise NotJudged("what a job in bfloat16 would take in float32 is not told by it")
    if value not in (*HALF, True):
        raise NotJudged(NO_HALF.format(value))
    _need_what_takes(study, key)
    stated = {one.value for one in find(GRADIENTS_IN[key]).stated(study.facts)}
    of_gradients = {beside[GRADIENTS_IN[key]]} if GRADIENTS_IN[key] in beside else stated
    purposes = (PARAMETER, GRADIENT) if of_gradients <= {None, *HALF} else (PARAMETER,)
    return with_short_shards(study, *purposes, note="what layers take that compute in such numbers is not counted")


def _travel_in(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """Gradients in numbers of half the size."""
    present = {one.value for one in find(key).stated(study.facts)}
    if value not in HALF and present & {*HALF}:
        raise NotJudged(NO_HALF.format(value))
    if any(beside.get(other) in (*HALF, True) for other, gradients in GRADIENTS_IN.items() if gradients == key):
        return Effect("comm.volume")  # what computes in such numbers tells it of both
    if value not in HALF:
        raise NotJudged(NO_HALF.format(value))
    _need_what_takes(study, key)
    return with_short_shards(study, GRADIENT) if key.startswith("fsdp2.") else with_short_gradients(study)


def _need_what_takes(study: Study, key: str) -> None:
    """Raises NotJudged where the run has no call that takes this number format."""
    (need_fully_shard if key.startswith("fsdp2.") else need_configuration)(study)


def _optimizer(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    return with_optimizer(study, value, beside.get(FREEZE_STEP))


def _freeze_step(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    return with_freeze_step(study, value, beside.get(OPTIMIZER))


def _alone(key: str) -> Callable[[Study, Any], Effect]:
    """The knob turned beside no other."""
    return lambda study, value: BESIDE[key](study, key, value, {})


def _collect_every(study: Study, value: Any) -> Effect:
    if value:
        raise NotJudged("how long a collection after so many steps takes is not known; gc.every=0 can be predicted")
    return Without("pause.gc").effect(study)


def _dynamic(study: Study, value: Any) -> Effect:
    if not value:
        raise NotJudged("how often a job compiles that makes a kernel for each shape is not told by one that does not")
    return Without("compute.recompile").effect(study)


BESIDE: Final[Mapping[str, Callable[[Study, str, Any, Mapping[str, Any]], Effect]]] = {
    **dict.fromkeys(GRADIENTS_IN, _computes_in),
    **dict.fromkeys(GRADIENTS_IN.values(), _travel_in),
    OPTIMIZER: _optimizer,
    FREEZE_STEP: _freeze_step,
    CHECK_KEY: with_overflow_check,
    WORKERS: with_workers,
    AHEAD: with_batches_ahead,
    STAY: with_workers_that_stay,
}
"""Of knobs that mean something else beside one another: key -> (study, key, value, all that is turned) -> what that
changes."""
CHANGES: Final[Mapping[str, Callable[[Study, Any], Effect]]] = {
    "ddp.bucket_cap_mb": with_cap,
    "zero_optimization.reduce_bucket_size": _bucket_size,
    "zero_optimization.stage3_prefetch_bucket_size": with_prefetch_bucket,
    "zero_optimization.stage3_max_live_parameters": with_live_parameters,
    "zero_optimization.stage": with_stage,
    "zero_optimization.overlap_comm": with_overlap,
    "zero_optimization.zero_quantized_weights": with_quantized("weights"),
    "zero_optimization.zero_quantized_gradients": with_quantized("gradients"),
    **{
        f"zero_optimization.{name}{key}": with_offload(name)
        for name in ("offload_optimizer", "offload_param")
        for key in ("", ".device")
    },
    "ddp.accumulate": _accumulate,
    "ddp.comm_hook": _comm_hook,
    **{key: _alone(key) for key in BESIDE},
    "ddp.broadcast_buffers": _broadcast,
    "fsdp2.modules_per_unit": with_modules_per_unit,
    "fsdp2.reshard_after_forward": with_reshard,
    "fsdp2.forward_prefetch": with_prefetch(backward=False),
    "fsdp2.backward_prefetch": with_prefetch(backward=True),
    "compile.dynamic": _dynamic,
    "gc.freeze": _freeze,
    "gc.every": _collect_every,
    "heterogeneous.speeds": with_speeds,
    "context_parallel.order": with_order,
    "fp8": with_float8,
    "fp8.enabled": with_float8,
}
"""Key -> (study, value) -> what that changes. Raises NotJudged where this run does not tell."""


def is_predicted(key: str) -> bool:
    """Whether it is known what values of a knob change in the steps of a run."""
    return key in CHANGES or key in STRUCTURES


def turned(key: str, value: Any, run: str) -> Request:
    """What turning a knob changes. run: as it is typed. Raises KnobError for a knob without a what-if."""
    change = CHANGES.get(key)
    setting = f"{key}={typed(key, value)}"
    if key in STRUCTURES:
        otherwise = "the job has no pipeline, as far as was captured"
        if not key.startswith(OF_PIPELINES):
            otherwise += f", and of others what {key} saves is not predicted yet; "
            otherwise += f"`dsprof fix {run} --set {setting} --verify` measures it"
        return replace(STRUCTURES[key](key, value), written=setting, otherwise=otherwise)
    if change is None:
        shown = redact_words([setting])[0]
        why = (
            f"what {key} saves is not predicted yet; `dsprof fix {run} --set {shlex.quote(shown)} --verify` measures it"
        )
        if not has_memory(key):
            raise KnobError(f"--set {shown}: {why} (predicted are {', '.join((*CHANGES, *STRUCTURES))})")
        change = _unknown(key, why)

    def effect(study: Study, beside: Mapping[str, Any]) -> Effect:
        return BESIDE[key](study, key, value, beside) if key in BESIDE else change(study, value)

    return Turned(setting, effect, key, value)


def _unknown(key: str, why: str) -> Callable[[Study, Any], Effect]:
    """Of a knob of which it is only known what it holds. why: what to do in a run that has what takes it."""
    fact = FACT_OF.get(key.partition(".")[0], "config")

    def change(study: Study, _: Any) -> Effect:
        raise NotJudged(why if study.facts.get(fact) else f"no call of {find(key).of} was seen in this run")

    return change
