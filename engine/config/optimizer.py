"""`optimizer`: which one, and its parameters, a model for each type."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic import Field, SerializeAsAny

from .model import Betas, Number, Params, ParamsTypes, TypedSection, Whole, torch_params


class RateParams(Params):
    """What all of these have."""

    lr: Number = Field(default=1e-3, ge=0)
    """Learning rate."""


class MomentParams(RateParams):
    """What optimizers with averages of the gradient and of its square have."""

    betas: Betas = (0.9, 0.999)
    """How slowly the averages of the gradient and of its square change."""

    eps: Number = Field(default=1e-8, ge=0)
    """Added to the denominator."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay a step, as a share of the learning rate."""

    bias_correction: bool = True
    """Divide the averages by what they lack in the first steps."""


class AdamWParams(MomentParams):
    """Adam with weight decay apart from the gradient, by torch's fused implementation. The default of `weight_decay` is
    DeepSpeed's, not torch's 0.01."""

    amsgrad: bool = False
    """Divide by the largest average square so far (Reddi et al. 2018)."""


class AdamParams(AdamWParams):
    """Adam, by torch's fused implementation; as in DeepSpeed it is AdamW unless `adam_w_mode` is false."""

    adam_w_mode: bool = True
    """Decay weights apart from the gradient (AdamW); false adds the decay to the gradient (L2)."""


class SGDParams(RateParams):
    """Stochastic gradient descent, torch's own."""

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


class LambParams(MomentParams):
    """LAMB (You et al. 2019): Adam's update, scaled for each parameter by the norms of weight and update."""

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


class OneBitAdamParams(MomentParams):
    """1-bit Adam (Tang et al. 2021): after a warm-up, signs travel instead of gradients, with error feedback.
    DeepSpeed has removed it."""

    freeze_step: Whole = Field(default=100_000, ge=1)
    """Steps of plain Adam before the second moment is frozen and the momentum is sent as one bit a value."""


OPTIMIZERS: Final[ParamsTypes] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "SGD": SGDParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    **torch_params(
        Adadelta="lr rho eps weight_decay",
        Adagrad="lr lr_decay weight_decay initial_accumulator_value eps",
        Adamax="lr betas eps weight_decay",
        ASGD="lr lambd alpha t0 weight_decay",
        NAdam="lr betas eps weight_decay momentum_decay decoupled_weight_decay",
        RAdam="lr betas eps weight_decay decoupled_weight_decay",
        RMSprop="lr alpha eps weight_decay momentum centered",
        Rprop="lr etas step_sizes",
    ),
}
"""Type, as `OptimizerConfig.type` spells it -> its parameters: DeepSpeed's, then what else of torch takes each element
of a parameter by itself, and so can be sharded."""


class OptimizerConfig(TypedSection):
    """The optimizer, where the script passes none of its own to `initialize`."""

    types: ClassVar[ParamsTypes] = OPTIMIZERS
    unknown: ClassVar[str] = (
        "is not an optimizer of this engine: they are {types}; write one of them, or pass the optimizer "
        "itself to `initialize(optimizer=...)`"
    )

    type: str = Field(examples=["AdamW"])
    """Which optimizer, in upper or lower case: those below, or `Adadelta`, `Adagrad`, `Adamax`, `ASGD`, `NAdam`,
    `RAdam`, `RMSprop`, `Rprop` of torch."""

    params: SerializeAsAny[Params] = Field(default={}, validate_default=True)
    """Its parameters: the tables below; those of torch's optimizers are torch's."""
