"""What `bf16.check_grad_overflow` costs, by which a step is skipped whose gradients are not finite.

DeepSpeed reads every gradient for it and asks the other ranks, in its own step, of which a run only tells how long it
takes. dsprof's engine looks at the norm, which it works out anyway, with the same communications. On a CPU nothing is
saved without; on a device its host waits for the norm, and could be ahead: what that saves is replayed where the host
waits for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...candidate import Between
from ...effect import Effect
from ...graph.chains import SYNC
from ...price.device import MISSED
from ...study import Study
from ...whatif.without_flows import WithoutFlows
from ..base import NotJudged, configurations, engine_config, without_effect
from .host_sync import CODE, waits_of_engine

BF16: Final = "bf16.enabled"


def with_overflow_check(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """Raises NotJudged where the run does not tell."""
    found = configurations(study)
    if not found:
        raise NotJudged("no configuration of an engine was seen in this run")
    sections = [one for content in found if isinstance(one := content.get("bf16"), Mapping)]
    is_on = beside.get(BF16, any(one.get("enabled") is True for one in sections))
    if not is_on:
        raise NotJudged(f"without {BF16} the key has no effect")
    if BF16 in beside and not any(one.get("enabled") is True for one in sections):
        raise NotJudged(
            f"what is checked in bfloat16 is only told by a job that runs in it; ask with {BF16}=true alone"
        )
    now = all(one.get("check_grad_overflow", True) is not False for one in sections)
    if bool(value) == now:
        raise NotJudged(f"it is {str(now).lower()} in this run")
    configured = engine_config(study)
    if configured is None:
        raise NotJudged(
            "DeepSpeed's reading of all gradients for infinities, and asking other ranks for theirs, is not told apart "
            "from the rest of its step; `dsprof fix --set ... --verify` measures it"
        )
    if not study.on_gpu or _optimizer_is_on_the_host(configured):
        return without_effect(study, CODE, "the norm is worked out, reduced and read by the host all the same")
    if value:
        raise NotJudged("how long the host would wait for the norm is only told by a job in which it does")
    return _without_waiting(study)


def _optimizer_is_on_the_host(configured: Mapping[str, Any]) -> bool:
    zero = configured.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    return isinstance(offload, Mapping) and offload.get("device") not in (None, "none")


def _without_waiting(study: Study) -> Effect:
    """Of hosts that wait for their device for the norm alone."""
    own, others = waits_of_engine(study)
    if not own:
        raise NotJudged("that the host waits for the norm in its step was not seen in this run")
    if others:
        raise NotJudged(
            f"the host also waits for the device at {', '.join(others)}: how far ahead of it it would be without the "
            f"norm is not known; the finding {CODE} has what no wait at all would save"
        )
    if not study.led_by_devices:
        raise NotJudged(
            "the host waits for the norm, and whether the device then stands idle is not known without its kernels: "
            "run again with --deep"
        )
    part = Between(1 - MISSED, 1 + MISSED, study.step_ms)
    return Effect(CODE, (WithoutFlows(SYNC),), between=part, notes=("steps whose gradients are not finite are taken",))
