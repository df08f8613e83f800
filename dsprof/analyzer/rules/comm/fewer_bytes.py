"""Fixes that have fewer bytes communicated, in the words of the job: numbers of half the size, more micro-batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...align.groups import PARAMETER
from ...finding import Fix, Gain
from ...study import Study
from ..base import at, code_fix, configurations, settings_fix
from .dimensions import GRADIENT

HOOK: Final = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
HOOK_CALLS: Final = {
    "accelerate": (
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])"
    ),
    "lightning": f"Trainer(strategy=DDPStrategy(ddp_comm_hook={HOOK}))",
}
"""Framework that makes the DistributedDataParallel -> what its user writes."""
ACCUMULATIONS: Final = {
    "accelerate": ("accelerate.gradient_accumulation_steps", "Accelerator(gradient_accumulation_steps={}), and around "
                   "each micro-batch `with accelerator.accumulate(model):`"),
    "lightning": ("lightning.accumulate_grad_batches", "Trainer(accumulate_grad_batches={})"),
    "transformers": ("trainer.gradient_accumulation_steps", "--gradient_accumulation_steps {}"),
}  # fmt: skip
"""Framework -> the knob of its micro-batches, and how its user writes it."""
IN_BF16: Final = "gradients travel in bfloat16, half of the bytes, and are rounded to its 8 bits"
COMPUTES_IN_BF16: Final = "layers compute in bfloat16, and the optimizer's copy stays what it is"
DTYPE_OF: Final = {"param_dtype": PARAMETER, "reduce_dtype": GRADIENT}
"""Field of FSDP's policy of mixed precision -> what travels in it."""
TRAVELS_IN: Final = "communication_data_type"
IN_FP16: Final = "gradients travel in float16, half of the bytes; those beyond 65,504 overflow"


def compression_fix(study: Study, ddp: Mapping[str, Any] | None, gain: Gain) -> Fix:
    """Gradients that travel in bfloat16, or in float16 where torch has no hook for that."""
    if ddp is None and _has_json(study):
        return Fix(
            "config",
            f"communication_data_type: bf16: {IN_BF16}",
            ({"op": "add", "path": "/communication_data_type", "value": "bf16"},),
            gain,
            (("communication_data_type", "bf16"),),
        )
    if ddp is None:
        return Fix("code", f"convert gradients to bfloat16 before they are reduced, and back: {IN_BF16}", gain=gain)
    framework, site = ddp.get("framework"), ddp.get("site")
    # torch refuses its hook for bfloat16 where it has no NCCL.
    knobs = {"ddp.comm_hook": "bf16" if study.on_gpu else "fp16"}
    hook, costs = (HOOK, IN_BF16) if study.on_gpu else (HOOK.replace("bf16", "fp16"), IN_FP16)
    call = HOOK_CALLS.get(str(framework), "")
    call = call if study.on_gpu else call.replace("bf16", "fp16").replace("BF16", "FP16")
    if call:
        return settings_fix(f"{call}: {costs}", {call: ""}, None, gain, knobs)
    where = f", which {framework} makes" if framework else at(site)
    title = f"register_comm_hook(None, {hook}) of the DistributedDataParallel{where}: {costs}"
    return Fix("code", title, (), gain, tuple(knobs.items()))


def short_shards_fix(study: Study, gain: Gain, purposes: Sequence[str]) -> Fix:
    """Shards that are gathered, gradients that are scattered, or both, in bfloat16. purposes: those of the two that
    travel in whole numbers."""
    fact = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if PARAMETER not in purposes and fact is None:
        return compression_fix(study, None, gain)
    costs = f"half of the bytes; {COMPUTES_IN_BF16}" if PARAMETER in purposes else IN_BF16
    if fact is None and _has_json(study):
        settings: dict[str, Any] = {"bf16": {"enabled": True}}
        knobs: dict[str, Any] = {"bf16.enabled": True}
        if any(content.get(TRAVELS_IN) is not None for content in configurations(study)) and GRADIENT in purposes:
            settings[TRAVELS_IN] = knobs[TRAVELS_IN] = "bf16"  # else gradients would stay what they are
        named = ", ".join(f"{key}: {json.dumps(value)}" for key, value in knobs.items())
        patch = tuple({"op": "add", "path": f"/{key}", "value": value} for key, value in settings.items())
        cast = "; the script casts what it gives the model" if PARAMETER in purposes else ""
        return Fix("config", f"{named}: {costs}{cast}", patch, gain, tuple(knobs.items()))
    if fact is None:
        return Fix("code", f"gather parameters and reduce gradients in bfloat16: {costs}", gain=gain)
    site, second = fact.get("site"), fact.get("version") == 2
    turned = {name: "bfloat16" for name, purpose in DTYPE_OF.items() if purpose in purposes}
    policy = ", ".join(
        f"{name}=torch.{dtype}" for name in DTYPE_OF if (dtype := turned.get(name) or fact.get(name)) is not None
    )
    if second:
        policy, knobs = f"MixedPrecisionPolicy({policy})", {f"fsdp2.{name}": dtype for name, dtype in turned.items()}
        return code_fix(f"fully_shard(mp_policy={policy}){at(site)}: {costs}", "mp_policy", policy, site, gain, knobs)
    policy = f"MixedPrecision({policy})"
    title = f"FullyShardedDataParallel(mixed_precision={policy}){at(site)}: {costs}"
    return code_fix(title, "mixed_precision", policy, site, gain)


def micro_batches_fix(study: Study, ddp: Mapping[str, Any] | None, gain: Gain) -> Fix:
    """Twice as many micro-batches for each step of the optimizer, of which only the last reduces."""
    now = _micro_batches(study)
    wanted = 2 * now if now else None
    costs = (
        "half as much is reduced for a sample (the gain is of each micro-batch); a batch has twice as many samples, so "
        "look at the learning rate"
    )
    framework = _framework(study, ddp)
    if framework in ACCUMULATIONS and wanted:
        key, call = ACCUMULATIONS[framework]
        same = ', with "gradient_accumulation_steps": "auto" in the JSON' if ddp is None else ""
        return Fix("code", f"{call.format(wanted)}{same}: {costs}", (), gain, ((key, wanted),))
    if ddp is None and _has_json(study) and wanted:
        patch = [{"op": "add", "path": "/gradient_accumulation_steps", "value": wanted}]
        whole = _whole_batch(study)
        if whole:
            patch.append({"op": "replace", "path": "/train_batch_size", "value": 2 * whole})
        return Fix("config", f"gradient_accumulation_steps: {wanted}: {costs}", tuple(patch), gain)
    times = f"{wanted} micro-batches" if wanted else "twice as many micro-batches"
    how = "`with model.no_sync():` around forward and backward of all but the last" if ddp is not None else (
        "reduce gradients in the last only"
    )  # fmt: skip
    where = at(ddp.get("site")) if ddp is not None else ""
    return Fix("code", f"{times} for each step of the optimizer, {how}{where}: {costs}", gain=gain)


def _framework(study: Study, ddp: Mapping[str, Any] | None) -> str:
    """What makes the DistributedDataParallel, or gives DeepSpeed its configuration; empty: the script itself."""
    facts = [ddp] if ddp is not None else study.facts.get("config", [])
    return next((str(fact["framework"]) for fact in facts if fact.get("framework")), "")


def _has_json(study: Study) -> bool:
    return bool(study.facts.get("deepspeed")) or bool(study.facts.get("config"))


def _whole_batch(study: Study) -> int | None:
    """`train_batch_size`, where the configuration says it."""
    said = [content.get("train_batch_size") for content in configurations(study)]
    return next((one for one in said if isinstance(one, int) and not isinstance(one, bool)), None)


def _micro_batches(study: Study) -> int | None:
    """Backwards for a step of the optimizer; None: those of several models, or not known."""
    told = [fact["accumulation"] for fact in study.facts.get("deepspeed", []) if fact.get("accumulation")]
    if told:
        return int(told[0])
    if len([fact for fact in study.facts.get("ddp", []) if fact.get("rank") == study.ranks[0]]) > 1:
        return None
    phases = study.training_phases
    mine = phases[(phases["rank"] == study.ranks[0]) & phases["step"].isin(study.step_numbers)]
    a_step = (mine["name"] == "backward").sum() / max(len(study.step_numbers), 1)
    return round(a_step) if a_step >= 1 and abs(a_step - round(a_step)) < 0.01 else None
