"""The time of a training step from its shape and thirteen figures of the hardware.

A layer, on one rank and one micro-batch of b sequences of s tokens, width h, a heads, forward and backward:

    device  = matrix products / TFLOP/s + elementwise and attention-score traffic / HBM + a fixed time
    layer   = (device^p + host^p)^(1/p) + all-reduces of b*s*h over the tensor-parallel group
              where host is what it takes to launch the layer's kernels: whichever is slower sets the pace

A pipeline of stages with these layers, each handing b*s*h to the next, and the last one with the logits as well, whose
products with the vocabulary have a rate of their own (they are of another shape, and so of another efficiency):

    pipeline = sum over the stages + (micro-batches - 1) * the slowest stage       (GPipe and 1F1B)
    step     = pipeline + data-parallel reduction of the gradients + optimizer

Matrix products are 24 b s h^2 + 4 b s^2 h a layer and forward (Narayanan et al., 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM"), four times that with activations computed again, three times
without. A ring over n ranks moves 2 (n-1)/n of the data; ZeRO stage 3 moves half as much again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np

from .steps import Column, StepShapes

Size = TypeVar("Size", Column, int)

HBM_GB_S: Final = 1500.0
"""The traffic figures below are said in passes at this rate; only their quotient is measured."""
SHARPNESS: Final = 3.0
"""The exponent p of host and device: 1 adds them, infinity takes the larger."""
HALF: Final = 2
"""Bytes of an activation or a parameter in the forward."""
LOSS_PASSES: Final = 20
"""Passes over the logits, in two bytes, of the loss and its gradient, as Megatron's cross-entropy in float32 makes
them: to float32 (3), largest (2), difference (4), exponents and their sum (4), quotient (4), gradient and back (3)."""


@dataclass(frozen=True)
class Coefficient:
    """A figure of the hardware. typical: what to expect of an A100 before anything is measured; spread: the standard
    deviation of the natural logarithm of what it may be instead."""

    name: str
    says: str
    unit: str
    typical: float
    spread: float


COEFFICIENTS: Final = (
    Coefficient("matrix_tflops", "matrix products", "TFLOP/s", 180, 0.5),
    Coefficient("elementwise_passes", "elementwise work of a layer, passes over its activations", "", 40, 1.5),
    Coefficient("score_passes", "attention scores, passes over them", "", 10, 1.5),
    Coefficient("layer_device_us", "fixed time of a layer on the device", "us", 300, 1.5),
    Coefficient("layer_host_us", "launching a layer's kernels", "us", 2000, 0.7),
    Coefficient("node_link_gb_s", "link inside a node", "GB/s", 200, 0.3),
    Coefficient("all_reduce_us", "latency of an all-reduce", "us", 30, 0.7),
    Coefficient("network_gb_s", "network of a node", "GB/s", 80, 0.3),
    Coefficient("logit_tflops", "matrix products with the vocabulary", "TFLOP/s", 150, 0.7),
    Coefficient("hand_over_us", "handing a micro-batch to the next stage", "us", 500, 1.5),
    Coefficient("hand_over_exposed", "share of a hand-over that nothing hides", "", 0.5, 1.0),
    Coefficient("gradient_bytes", "data-parallel reduction that nothing hides, a parameter", "bytes", 2, 0.5),
    Coefficient("optimizer_bytes", "memory traffic of the optimizer, a parameter", "bytes", 20, 0.7),
)


class Expected(NamedTuple):
    """What is expected of COEFFICIENTS before anything is measured, in their order. spread: standard deviations of the
    logarithms. most: what the hardware does at most by its data sheet, infinite where that says nothing."""

    typical: Column
    spread: Column
    most: Column


TYPICAL: Final = np.array([one.typical for one in COEFFICIENTS])
UNKNOWN: Final = Expected(TYPICAL, np.array([one.spread for one in COEFFICIENTS]), np.full(len(COEFFICIENTS), np.inf))
"""Of hardware that nothing is told of."""


def slower(one: Column, other: Column) -> Column:
    """(one^p + other^p)^(1/p), without overflow."""
    most, least = np.maximum(one, other), np.minimum(one, other)
    return most * (1 + (least / most) ** SHARPNESS) ** (1 / SHARPNESS)


def parameters(steps: StepShapes) -> Column:
    """Of the rank that has most of them: its layers' 12 h^2 each, and the embedding, split over tp and pp."""
    layers = np.ceil(steps.layers / steps.pp)
    return (12 * layers * steps.hidden**2 + steps.vocabulary * steps.hidden) / steps.tp


def layer_flops(tokens: Size, sequence: Size, hidden: Size) -> Size:
    """Matrix products of one layer for so many tokens, forward, all tensor-parallel ranks together."""
    return 24 * tokens * hidden**2 + 4 * tokens * sequence * hidden


@dataclass(frozen=True)
class Cost:
    """Where the time of steps goes, ms: they add up to `step`.

    compute: layers and logits of all micro-batches of the slowest stage. bubble: what the pipeline waits at its start
    and end. tensor, hand_over: communication between layers and between stages. data, optimizer: after the backward.
    """

    compute: Column
    tensor: Column
    hand_over: Column
    bubble: Column
    data: Column
    optimizer: Column

    @property
    def step(self) -> Column:
        return self.compute + self.tensor + self.hand_over + self.bubble + self.data + self.optimizer


def cost(values: Column, steps: StepShapes, layer_effect: Column | float = 0.0) -> Cost:
    """values: of COEFFICIENTS, in their order. layer_effect: natural logarithm of how much slower a layer's kernels are
    than the model says, as was measured for this shape."""
    figure = dict(zip((one.name for one in COEFFICIENTS), values, strict=True))
    s = steps
    seconds_hbm, again = HBM_GB_S * 1e9, 3 + s.recompute
    tokens = s.micro_batch * s.sequence
    activations = tokens * s.hidden * HALF
    flops_s = figure["matrix_tflops"] * 1e12
    wide = s.tp > s.gpus_per_node
    link = figure["node_link_gb_s"] * 1e9
    network = figure["network_gb_s"] * 1e9

    traffic = activations / s.tp * figure["elementwise_passes"]
    scores = s.heads * s.micro_batch * s.sequence**2 * HALF / s.tp
    device = (
        again * layer_flops(tokens, s.sequence, s.hidden) / s.tp / flops_s
        + (traffic + scores * figure["score_passes"]) / seconds_hbm
        + figure["layer_device_us"] / 1e6
    )
    effect = np.exp(layer_effect)
    layer = slower(device, np.full_like(device, figure["layer_host_us"] / 1e6)) * effect
    reductions = 2 * (2 + s.recompute)
    ring = 2 * (s.tp - 1) / s.tp * activations / np.where(wide, network, link)
    reduced = reductions * (ring + (s.tp > 1) * figure["all_reduce_us"] / 1e6) * effect

    logits = (
        6 * tokens * s.hidden * s.vocabulary / s.tp / (figure["logit_tflops"] * 1e12)
        + tokens * s.vocabulary * HALF / s.tp * LOSS_PASSES / seconds_hbm
    )
    across = s.tp * s.dp >= s.gpus_per_node
    way = np.where(across, network / s.gpus_per_node, link)
    handed = (s.pp > 1) * (2 * activations / s.tp / way * figure["hand_over_exposed"] + figure["hand_over_us"] / 1e6)

    # The first stages have a layer more where the layers do not divide; the last one has the logits.
    most, last = np.ceil(s.layers / s.pp), np.floor(s.layers / s.pp)
    first_slowest = most * (layer + reduced) >= last * (layer + reduced) + logits
    computed = np.where(first_slowest, most * layer, last * layer + logits)
    between = np.where(first_slowest, most, last) * reduced
    slowest = computed + between + handed
    through = s.layers * (layer + reduced) + logits + s.pp * handed

    size = parameters(s)
    outside = s.dp * s.tp > s.gpus_per_node
    gradients = np.where(outside, network / np.minimum(s.tp, s.gpus_per_node), link)
    volume = np.where(s.zero >= 3, 3, 2)  # parameters are gathered twice, gradients reduced once
    data = volume * (s.dp - 1) / s.dp * size * figure["gradient_bytes"] / gradients
    optimizer = size / np.where(s.zero >= 1, s.dp, 1) * figure["optimizer_bytes"] / seconds_hbm
    m = s.micro_batches
    parts = (m * computed, m * between, m * handed, through - slowest, data, optimizer)
    return Cost(*(1e3 * part for part in parts))
