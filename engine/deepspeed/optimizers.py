"""DeepSpeed's optimizers by name. Each is a function, and what it makes is the engine's optimizer of that sort, which
knows how to step masters wherever they are: on a GPU, or offloaded to host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

from torch.optim import Optimizer

from ..optim import build

BETAS: Final = (0.9, 0.999)

ONLY: Final = {"amsgrad": False, "set_grad_none": True, "fp32_optimizer_states": True}
"""Option -> the one way that the engine has with it, DeepSpeed's default."""


def _optimizer(name: str, kind: str, params: str, doc: str, **defaults: Any) -> Callable[..., Optimizer]:
    """A function with DeepSpeed's arguments, `params` and options, that makes the engine's `kind` of optimizer of them.

    It raises ValueError for what is not supported."""
    names = [Parameter(params, Parameter.POSITIONAL_OR_KEYWORD)]
    names += [Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=value) for key, value in defaults.items()]
    signature = Signature(names)

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
    "FusedAdam", "Adam", "params", "torch's fused AdamW, or Adam without `adam_w_mode`.",
    lr=1e-3, bias_correction=True, betas=BETAS, eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False,
    set_grad_none=True,
)  # fmt: skip

DeepSpeedCPUAdam = _optimizer(
    "DeepSpeedCPUAdam", "Adam", "model_params",
    "torch's fused AdamW, or Adam without `adamw_mode`: `zero_optimization.offload_optimizer` is what brings it to the "
    "CPU. Its states have the type of the masters, fp32.",
    lr=1e-3, bias_correction=True, betas=BETAS, eps=1e-8, weight_decay=0.0, amsgrad=False, adamw_mode=True,
    fp32_optimizer_states=True,
)  # fmt: skip

DeepSpeedCPUAdagrad = _optimizer(
    "DeepSpeedCPUAdagrad", "Adagrad", "model_params", "torch's Adagrad.",
    lr=1e-2, eps=1e-10, weight_decay=0.0, amsgrad=False, fp32_optimizer_states=True,
)  # fmt: skip

FusedLion = _optimizer(
    "FusedLion", "Lion", "params", "Lion.", lr=1e-3, betas=BETAS, weight_decay=0.0, set_grad_none=True
)

DeepSpeedCPULion = _optimizer(
    "DeepSpeedCPULion", "Lion", "model_params", "Lion.",
    lr=1e-3, betas=BETAS, weight_decay=0.0, fp32_optimizer_states=True,
)  # fmt: skip

FusedLamb = _optimizer(
    "FusedLamb", "Lamb", "params",
    "LAMB, for ZeRO stage 0: in the others it must know what is sharded, and so be made from the configuration.",
    lr=1e-3, bias_correction=True, betas=BETAS, eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0,
    max_coeff=10.0, min_coeff=0.01, amsgrad=False,
)  # fmt: skip
