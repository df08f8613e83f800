"""`optimizer`: which one, and its parameters, a model for each type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, ValidationInfo, field_validator

from .keys import nearest
from .model import Betas, Complaint, Number, Params, Section, SectionType, Whole, shown, torch_params


class AdamParams(Params):
    """Adam, by torch's fused implementation; as in DeepSpeed it is AdamW unless `adam_w_mode` is false."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""

    betas: Betas = (0.9, 0.999)
    """How slowly the averages of the gradient and of its square change."""

    eps: Number = Field(default=1e-8, ge=0)
    """Added to the denominator."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate."""

    adam_w_mode: bool = True
    """Decay weights apart from the gradient (AdamW); false adds the decay to the gradient (L2)."""

    bias_correction: bool = True
    """Divide the averages by what they lack in the first steps."""

    amsgrad: bool = False
    """Divide by the largest average square so far (Reddi et al. 2018)."""


class AdamWParams(Params):
    """Adam with weight decay apart from the gradient, by torch's fused implementation."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""

    betas: Betas = (0.9, 0.999)
    """How slowly the averages of the gradient and of its square change."""

    eps: Number = Field(default=1e-8, ge=0)
    """Added to the denominator."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate. DeepSpeed's default, not torch's 0.01."""

    bias_correction: bool = True
    """Divide the averages by what they lack in the first steps."""

    amsgrad: bool = False
    """Divide by the largest average square so far (Reddi et al. 2018)."""


class SGDParams(Params):
    """Stochastic gradient descent, torch's own."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""

    momentum: Number = Field(default=0.0, ge=0)
    """Momentum."""

    dampening: Number = 0.0
    """How much of the gradient is kept out of the momentum."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""

    nesterov: bool = False
    """Nesterov momentum; it takes a momentum above 0 and no dampening."""


class LionParams(Params):
    """Lion (Chen et al. 2023): the sign of an averaged gradient, one state a parameter."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate; Lion takes about a tenth of Adam's."""

    betas: Betas = (0.9, 0.999)
    """How much of the average goes into the update, and how slowly it changes."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate."""


class LambParams(Params):
    """LAMB (You et al. 2019): Adam's update, scaled for each parameter by the norms of weight and update."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""

    betas: Betas = (0.9, 0.999)
    """How slowly the averages of the gradient and of its square change."""

    eps: Number = Field(default=1e-8, ge=0)
    """Added to the denominator."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate."""

    bias_correction: bool = True
    """Divide the averages by what they lack in the first steps."""

    eps_inside_sqrt: bool = False
    """Add `eps` below the root of the second average instead of to it."""

    max_coeff: Number = Field(default=10.0, gt=0)
    """Largest factor by which an update is scaled."""

    min_coeff: Number = Field(default=0.01, ge=0)
    """Smallest factor by which an update is scaled."""


class MuonParams(Params):
    """Muon (Jordan 2024) for the matrices of hidden layers, AdamW for the rest: embeddings, heads, norms, biases."""

    lr: Number | None = Field(default=None, ge=0)
    """Learning rate of both halves where their own is not given. Default: 0.02 for Muon and 0.0003 for AdamW."""

    momentum: Number = Field(default=0.95, ge=0, lt=1)
    """Momentum of the Muon half."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate."""

    muon_lr: Number | None = Field(default=None, ge=0)
    """Learning rate of the Muon half. Default: `lr`."""

    adam_lr: Number | None = Field(default=None, ge=0)
    """Learning rate of the AdamW half. Default: `lr`."""

    betas: Betas = (0.9, 0.95)
    """How slowly the averages of the AdamW half change."""

    eps: Number = Field(default=1e-10, ge=0)
    """Added to the denominator in the AdamW half."""

    adam_w_mode: bool = True
    """In the AdamW half, decay weights apart from the gradient; false adds the decay to the gradient (L2)."""


class OneBitAdamParams(Params):
    """1-bit Adam (Tang et al. 2021): after a warm-up, signs travel instead of gradients, with error feedback.
    DeepSpeed has removed it."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""

    freeze_step: Whole = Field(default=100_000, ge=1)
    """Steps of plain Adam before the second moment is frozen and the momentum is sent as one bit a value."""

    betas: Betas = (0.9, 0.999)
    """How slowly the averages of the gradient and of its square change."""

    eps: Number = Field(default=1e-8, ge=0)
    """Added to the denominator."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """L2 penalty, added to the update."""

    bias_correction: bool = True
    """Divide the averages by what they lack in the first steps."""


OPTIMIZERS: Final[dict[str, type[Params]]] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "SGD": SGDParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    **{
        type: torch_params(type, names)
        for type, names in {
            "Adadelta": "lr rho eps weight_decay",
            "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps",
            "Adamax": "lr betas eps weight_decay",
            "ASGD": "lr lambd alpha t0 weight_decay",
            "NAdam": "lr betas eps weight_decay momentum_decay decoupled_weight_decay",
            "RAdam": "lr betas eps weight_decay decoupled_weight_decay",
            "RMSprop": "lr alpha eps weight_decay momentum centered",
            "Rprop": "lr etas step_sizes",
        }.items()
    },
}
"""Type, as `OptimizerConfig.type` spells it -> its parameters: DeepSpeed's, then what else of torch takes each element
of a parameter by itself, and so can be sharded."""


def optimizer_type(value: object) -> object:
    """The type as OPTIMIZERS spells it: like DeepSpeed, we do not mind the case."""
    return next((name for name in OPTIMIZERS if name.lower() == str(value).lower()), value)


def _known(value: str) -> str:
    if value not in OPTIMIZERS:
        near = nearest(value, OPTIMIZERS)
        hint = "" if near is None else f" the nearest is {near};"
        raise Complaint(
            f"{shown(value)} is not an optimizer of this engine: they are {', '.join(OPTIMIZERS)};{hint}"
            " write one of them, or pass the optimizer itself to `initialize(optimizer=...)`"
        )
    return value


class OptimizerConfig(Section):
    """The optimizer, where the script passes none of its own to `initialize`."""

    type: Annotated[str, BeforeValidator(optimizer_type), AfterValidator(_known)] = Field(examples=["AdamW"])
    """Which optimizer, in upper or lower case: those below, or `Adadelta`, `Adagrad`, `Adamax`, `ASGD`, `NAdam`,
    `RAdam`, `RMSprop`, `Rprop` of torch."""

    params: SerializeAsAny[Params] = Field(default={}, validate_default=True)
    """Its parameters: the tables below; those of torch's optimizers are torch's."""

    @classmethod
    def section_of(cls, key: str, neighbours: Mapping[Any, Any]) -> SectionType | None:
        return OPTIMIZERS.get(str(optimizer_type(neighbours.get("type")))) if key == "params" else None

    @classmethod
    def sections_under(cls, key: str) -> tuple[SectionType, ...]:
        return tuple(OPTIMIZERS.values()) if key == "params" else ()

    @field_validator("params", mode="before")
    @classmethod
    def _of_that_type(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        return OPTIMIZERS[info.data["type"]].model_validate(value) if "type" in info.data else Params()
