"""`fp16`, `bf16` and `data_types`: what is computed and accumulated in which floating-point type."""

from __future__ import annotations

from pydantic import Field

from .model import DataType, Number, Section, Whole


class Fp16Config(Section):
    """Weights and computation in fp16, master weights in fp32, and the loss scaled so that small gradients survive."""

    enabled: bool = False
    """Train in fp16."""

    auto_cast: bool = False
    """Cast floating-point inputs of the model to fp16."""

    loss_scale: Number = Field(default=0.0, ge=0)
    """A fixed factor for the loss; 0 finds it as training goes, by the keys below."""

    initial_scale_power: Whole = Field(default=16, ge=0, le=127)
    """The dynamic scale begins at 2 to this power."""

    loss_scale_window: Whole = Field(default=1000, ge=1)
    """Steps without overflow after which the dynamic scale doubles."""

    hysteresis: Whole = Field(default=2, ge=1)
    """The dynamic scale is halved at the overflow with this number; each overflow skips its step."""

    consecutive_hysteresis: bool = False
    """A step without overflow restores the hysteresis; false: only the doubling of the scale does."""

    min_loss_scale: Number = Field(default=1.0, gt=0)
    """The dynamic scale never falls below this; an overflow there is an error."""


class Bf16Config(Section):
    """Weights and computation in bf16, master weights in fp32. The range is that of fp32: no loss scale."""

    enabled: bool = False
    """Train in bf16."""

    check_grad_overflow: bool = True
    """Skip a step whose gradient norm is not finite; false takes it."""


class DataTypesConfig(Section):
    """Types that do not follow from `fp16` and `bf16`."""

    grad_accum_dtype: DataType | None = None
    """In what the gradients of several micro-batches are summed up. Default: the type that is trained in."""
