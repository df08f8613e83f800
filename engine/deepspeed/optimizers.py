"""DeepSpeed's optimizers by name. Each is a function, and what it makes is the engine's optimizer of that sort, which
knows how to step masters wherever they are: on a GPU, or offloaded to host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

from torch.optim import Optimizer

from ..config.optimizer import OPTIMIZERS
from ..optim import build

ONLY: Final = {"amsgrad": False, "set_grad_none": True, "fp32_optimizer_states": True}
"""Option -> the one way that the engine has with it, DeepSpeed's default."""


def _optimizer(name: str, kind: str, arguments: str, doc: str, **others: Any) -> Callable[..., Optimizer]:
    """A function with these of DeepSpeed's arguments, parameters first, that makes the engine's `kind` of optimizer.
    Defaults are the configuration's, but for `others`.

    It raises ValueError for what is not supported."""
    params, *names = arguments.split()
    defaults = {**OPTIMIZERS[kind]().arguments(), **ONLY, **others}
    signature = Signature([
        Parameter(params, Parameter.POSITIONAL_OR_KEYWORD),
        *(Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=defaults[key]) for key in names),
    ])  # fmt: skip

    def make(*args: Any, **kwargs: Any) -> Optimizer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        given = options.pop(params)
        for key, only in ONLY.items():
            if bool(options.pop(key, only)) != only:
                raise ValueError(f"{name}: the engine has no other way with {key} than the default; leave it out")
        norm = options.pop("max_grad_norm", 0.0)
        if norm:
            raise ValueError(
                f'{name}: max_grad_norm={norm} is not supported; write "gradient_clipping" in the configuration'
            )
        if "adamw_mode" in options:
            options["adam_w_mode"] = options.pop("adamw_mode")
        return build(kind, options, given)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = doc
    make.__signature__ = signature  # type: ignore[attr-defined]
    return make


FusedAdam = _optimizer(
    "FusedAdam", "Adam", "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    "torch's fused AdamW, or Adam without `adam_w_mode`.",
)  # fmt: skip

DeepSpeedCPUAdam = _optimizer(
    "DeepSpeedCPUAdam", "Adam",
    "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states",
    "torch's fused AdamW, or Adam without `adamw_mode`: `zero_optimization.offload_optimizer` is what brings it to the "
    "CPU. Its states have the type of the masters, fp32.",
    adamw_mode=True,
)  # fmt: skip

DeepSpeedCPUAdagrad = _optimizer(
    "DeepSpeedCPUAdagrad", "Adagrad", "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
    "torch's Adagrad.", lr=1e-2, eps=1e-10, weight_decay=0.0,
)  # fmt: skip

FusedLion = _optimizer("FusedLion", "Lion", "params lr betas weight_decay set_grad_none", "Lion.")

DeepSpeedCPULion = _optimizer(
    "DeepSpeedCPULion", "Lion", "model_params lr betas weight_decay fp32_optimizer_states", "Lion."
)

FusedLamb = _optimizer(
    "FusedLamb", "Lamb",
    "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff amsgrad",
    "LAMB, for ZeRO stage 0: in the others it must know what is sharded, and so be made from the configuration.",
    max_grad_norm=0.0,
)  # fmt: skip
