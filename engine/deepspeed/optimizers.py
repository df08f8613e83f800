"""DeepSpeed's optimizers by name. Each is a function, and what it makes is the engine's optimizer of that sort, which
knows how to step masters wherever they are: on a GPU, or offloaded to host memory.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..optim import build

Betas = tuple[float, float]


def FusedAdam(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Optimizer:
    """torch's fused AdamW, or Adam without `adam_w_mode`. Raises ValueError for what DeepSpeed's has not."""
    _refuse("FusedAdam", amsgrad=amsgrad, set_grad_none=not set_grad_none)
    return _adam(params, lr, betas, eps, weight_decay, adam_w_mode, bias_correction)


def DeepSpeedCPUAdam(
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """torch's fused AdamW, or Adam without `adamw_mode`: `zero_optimization.offload_optimizer` is what brings it to the
    CPU. Its states have the type of the masters, fp32. Raises ValueError for what is not supported."""
    _refuse("DeepSpeedCPUAdam", amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
    return _adam(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction)


def DeepSpeedCPUAdagrad(
    model_params: ParamsT,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """torch's Adagrad. Raises ValueError for what is not supported."""
    _refuse("DeepSpeedCPUAdagrad", amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
    return _made("Adagrad", model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def FusedLion(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> Optimizer:
    """Lion."""
    _refuse("FusedLion", set_grad_none=not set_grad_none)
    return _made("Lion", params, lr=lr, betas=betas, weight_decay=weight_decay)


def DeepSpeedCPULion(
    model_params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """Lion."""
    _refuse("DeepSpeedCPULion", fp32_optimizer_states=not fp32_optimizer_states)
    return _made("Lion", model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def FusedLamb(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> Optimizer:
    """LAMB, for ZeRO stage 0: in the others it must know what is cut, and so be made from the configuration."""
    _refuse("FusedLamb", amsgrad=amsgrad)
    if max_grad_norm:
        raise ValueError(
            f'FusedLamb: max_grad_norm={max_grad_norm} is not supported; write "gradient_clipping" in the configuration'
        )
    return _made(
        "Lamb", params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, eps_inside_sqrt=eps_inside_sqrt,
        weight_decay=weight_decay, max_coeff=max_coeff, min_coeff=min_coeff,
    )  # fmt: skip


def _adam(
    params: ParamsT, lr: float, betas: Betas, eps: float, weight_decay: float, decoupled: bool, corrected: bool
) -> Optimizer:
    return _made(
        "Adam", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam_w_mode=decoupled,
        bias_correction=corrected,
    )  # fmt: skip


def _made(type: str, params: Any, **options: Any) -> Optimizer:
    return build(type, options, params)


def _refuse(name: str, **asked: bool) -> None:
    for option, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{name}: the engine has no other way with {option} than the default; leave it out")
