"""Keys of how a step is computed, each seen to take effect: batches, clipping, precision, recomputation, tags."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from config_coverage import alive
from engines import LAYER, WIDTH, Layers, configuration, engine_for, train
from models import batches, build
from ranks import Ranks
from spans import comms, recorded
from torch import Tensor, nn

from dsprof.engine.hooks import Span

torch.set_num_threads(1)

ALONE: dict[str, Any] = {"dist_init_required": False}
"""For an engine in the test's own process."""


# --- batches


def batch_sizes(config: dict[str, Any], samples: int = 24) -> list[list[int]]:
    """Samples of each micro-batch, step by step, of an epoch in one process."""
    model = Layers(1)
    seen: list[list[int]] = []
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    data = torch.ones(samples, WIDTH)
    with engine_for(model, config, training_data=data, **ALONE) as engine:
        assert engine.training_dataloader is not None
        stream = iter(engine.training_dataloader)
        with contextlib.suppress(StopIteration, RuntimeError):
            while True:
                sizes.clear()
                engine.train_batch(stream)
                seen.append(list(sizes))
    return seen


def sized(**sizes: int) -> dict[str, Any]:
    config = configuration()
    del config["train_micro_batch_size_per_gpu"]
    return {**config, **sizes}


@alive("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
def test_batch_sizes() -> None:
    micro, accumulate = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert batch_sizes(sized(train_batch_size=12)) == [[12], [12]]
    assert batch_sizes(sized(train_batch_size=8)) == [[8], [8], [8]]
    assert batch_sizes(sized(train_batch_size=12, **{micro: 4})) == [[4, 4, 4], [4, 4, 4]]
    assert batch_sizes(sized(train_batch_size=12, **{micro: 6})) == [[6, 6], [6, 6]]
    assert batch_sizes(sized(**{micro: 4, accumulate: 2})) == [[4, 4], [4, 4], [4, 4]]
    assert batch_sizes(sized(**{micro: 4, accumulate: 3})) == [[4, 4, 4], [4, 4, 4]]


@alive("dataloader_drop_last")
def test_dataloader_drop_last() -> None:
    assert batch_sizes(configuration(train_batch_size=2), samples=5) == [[2], [2], [1]]
    assert batch_sizes(configuration(train_batch_size=2, dataloader_drop_last=True), samples=5) == [[2], [2]]


# --- gradients


@alive("gradient_clipping")
def test_gradient_clipping() -> None:
    """SGD with a rate of 1: the weights move by the gradients, which are longer than 1 as they are."""
    for clip, expected in ((0.0, None), (0.25, 0.25), (0.5, 0.5)):
        model = Layers(1)
        before = model[0].weight.detach().clone()
        config = configuration(gradient_clipping=clip, optimizer={"type": "SGD", "params": {"lr": 1.0}})
        with engine_for(model, config, **ALONE) as engine:
            engine.backward(engine(torch.full((2, WIDTH), 5.0)))
            engine.step()
            norm = engine.get_global_grad_norm()
        moved = (model[0].weight.detach() - before).norm().item()
        assert norm is not None
        assert norm > 1
        assert moved == pytest.approx(norm if expected is None else expected, rel=1e-4)


class Steep(nn.Module):
    """One weight of eight elements, with a gradient of `slope` in each."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.slope).sum() * x.to(self.weight.dtype).mean()


def norm_of(rank: int, config: dict[str, Any]) -> tuple[float | None, int]:
    """Of gradients of 40,000 on each rank, in fp16, in which 65,504 is the largest number; steps skipped."""
    with engine_for(Steep(40_000.0), config) as engine:
        train(engine, 1)
        return engine.get_global_grad_norm(), engine.skipped_steps


@alive("prescale_gradients", "gradient_predivide_factor")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_divided_before_they_are_summed_up(ranks: Ranks, stage: int) -> None:
    for scaling, survives in (
        ({}, False), ({"prescale_gradients": True}, True),
        ({"gradient_predivide_factor": 1.5}, True), ({"gradient_predivide_factor": 1.1}, False),
    ):  # fmt: skip
        # All-reduced, so that the sum is made in the gradients' own type.
        zero = {"reduce_scatter": False} if stage else {}
        config = configuration(stage, zero=zero, fp16={"enabled": True, "loss_scale": 1})
        for norm, skipped in ranks.run(2, norm_of, {**config, **scaling}):
            assert norm == (pytest.approx(40_000 * math.sqrt(8), rel=1e-3) if survives else math.inf)
            assert skipped == (not survives)


def gradients_of(rank: int, config: dict[str, Any]) -> list[Span]:
    """The communications that gradients take in the last of three steps."""
    model = build(odd=False)
    with engine_for(model, config) as engine, recorded() as spans:
        for ids in batches(3, 1, 2)[:, 0, rank]:
            engine.backward(engine(ids))
            engine.step()
    return comms(spans, "gradient", 2)


@alive("sparse_gradients")
def test_sparse_gradients(ranks: Ranks) -> None:
    """The table has 31 x 16 elements, and a batch uses at most 14 rows: fewer bytes, in more messages."""
    dense, sparse = (ranks.run(2, gradients_of, configuration(sparse_gradients=value))[0] for value in (False, True))
    assert (len(dense), len(sparse)) == (1, 4)
    assert (dense[0].bytes or 0) - (sparse[0].bytes or 0) == 4 * (31 * 16 + 1)


@alive("communication_data_type")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_communication_data_type(ranks: Ranks, stage: int) -> None:
    (whole,), (half,) = (
        ranks.run(2, gradients_of, configuration(stage, communication_data_type=value))[0] for value in (None, "bf16")
    )
    assert (whole.dtype, half.dtype) == ("float32", "bfloat16")
    assert whole.bytes == 2 * (half.bytes or 0)


class Untested(torch.optim.SGD):
    """The script's own."""


@alive("zero_allow_untested_optimizer")
def test_zero_allow_untested_optimizer(ranks: Ranks) -> None:
    for stage in (1, 3):
        assert all("Untested" in text for text in ranks.run(2, with_own_optimizer, stage, False))
        assert ranks.run(2, with_own_optimizer, stage, True) == ["", ""]


def with_own_optimizer(rank: int, stage: int, allow: bool) -> str:
    model = Layers()
    config = configuration(stage, zero_allow_untested_optimizer=allow)
    del config["optimizer"]
    try:
        with engine_for(model, config, optimizer=Untested(model.parameters(), lr=0.1)) as engine:
            train(engine, 1)
    except ValueError as error:
        return str(error)
    return ""


# --- precision


class Probe(nn.Module):
    """Tells in what types it is called, and takes what loss it is told to have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: tuple[torch.dtype, torch.dtype] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype, x.dtype
        return (self.weight.float() * x.float()).sum()


def types(**sections: Any) -> tuple[torch.dtype, torch.dtype] | None:
    model = Probe()
    with engine_for(model, configuration(**sections), **ALONE) as engine:
        engine.backward(engine(torch.ones(4)))
        engine.step()
    return model.seen


@alive("fp16.enabled", "fp16.auto_cast", "bf16.enabled")
def test_types_of_weights_and_inputs() -> None:
    assert types() == (torch.float32, torch.float32)
    assert types(bf16={"enabled": True}) == (torch.bfloat16, torch.float32)
    assert types(fp16={"enabled": True}) == (torch.float16, torch.float32)
    assert types(fp16={"enabled": True, "auto_cast": True}) == (torch.float16, torch.float16)


def scales(overflows: str, **fp16: Any) -> list[float]:
    """The loss scale of each step; `x` is one that overflows."""
    found = []
    with engine_for(Probe(), configuration(fp16={"enabled": True, **fp16}), **ALONE) as engine:
        for step in overflows:
            found.append(engine.loss_scale)
            engine.backward(engine(torch.full((4,), math.inf if step == "x" else 1e-3)))
            engine.step()
            assert engine.was_step_applied() is (step != "x")
    return found


@alive("fp16.loss_scale", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.loss_scale_window")
def test_loss_scales() -> None:
    start = {"initial_scale_power": 4, "hysteresis": 1}
    assert scales("-x-x-", loss_scale=128) == [128] * 5
    assert scales("-x-x-", **start) == [16, 16, 8, 8, 4]
    assert scales("-x-x-", **{**start, "initial_scale_power": 5}) == [32, 32, 16, 16, 8]
    assert scales("-x-x-", **{**start, "hysteresis": 2}) == [16, 16, 16, 16, 8]
    assert scales("x-----", **start, loss_scale_window=2) == [16, 8, 8, 8, 16, 16]
    assert scales("x-----", **start, loss_scale_window=3) == [16, 8, 8, 8, 8, 16]


@alive("fp16.consecutive_hysteresis")
def test_consecutive_hysteresis() -> None:
    start = {"initial_scale_power": 4, "hysteresis": 2}
    assert scales("x-x-x-", **start) == [16, 16, 16, 8, 8, 4]
    assert scales("x-x-x-", **start, consecutive_hysteresis=True) == [16] * 6


@alive("fp16.min_loss_scale")
def test_min_loss_scale() -> None:
    start = {"initial_scale_power": 2, "hysteresis": 1}
    assert scales("xx-", **start, min_loss_scale=1) == [4, 2, 1]
    with pytest.raises(RuntimeError, match="already at its minimum, 2"):
        scales("xx-", **start, min_loss_scale=2)


@alive("bf16.check_grad_overflow")
def test_check_grad_overflow() -> None:
    for check in (True, False):
        model = Probe()
        with engine_for(model, configuration(bf16={"enabled": True, "check_grad_overflow": check}), **ALONE) as engine:
            engine.backward(engine(torch.full((4,), math.inf)))
            engine.step()
            assert engine.skipped_steps == check
        assert bool(torch.isfinite(model.weight).all()) is check


def accumulated(rank: int, config: dict[str, Any]) -> float:
    """How far a weight moves by gradients of 1, and of 2^-9 seven times: in bf16 1 + 2^-9 is 1."""
    with engine_for(Probe(), config) as engine:
        before = engine.zero.trainable[0].master
        assert before is not None
        start = before.detach().clone()
        for step in range(8):
            engine.backward(engine(torch.full((4,), 1.0 if step == 0 else 2.0**-9)), scale_wrt_gas=False)
            engine.step()
        return (start - before.detach()).max().item()


@alive("data_types.grad_accum_dtype")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_accum_dtype(ranks: Ranks, stage: int, world_size: int) -> None:
    for name, expected in (("fp32", 1 + 7 * 2.0**-9), ("bf16", 1.0)):
        config = configuration(
            stage, gradient_accumulation_steps=8, bf16={"enabled": True}, data_types={"grad_accum_dtype": name},
            optimizer={"type": "SGD", "params": {"lr": 1.0}}, communication_data_type="fp32",
        )  # fmt: skip
        assert ranks.run(world_size, accumulated, config) == [expected] * world_size


# --- recomputation


def recomputed(**section: Any) -> list[str]:
    """Blocks that are recomputed in a step, and `to_host` for each copy of activations."""
    with (
        engine_for(build(odd=False), configuration(activation_checkpointing=section), **ALONE) as engine,
        recorded() as spans,
    ):
        engine.backward(engine(batches(1, 1, 1)[0, 0, 0]))
        engine.step()
    return [
        (span.module or "") if span.name == "recompute" else span.name
        for span in spans
        if span.name in ("recompute", "to_host")
    ]


@alive(
    "activation_checkpointing.policy", "activation_checkpointing.every", "activation_checkpointing.blocks",
    "activation_checkpointing.cpu_checkpointing",
)  # fmt: skip
def test_recomputation() -> None:
    assert recomputed() == []
    assert recomputed(policy="full") == ["blocks.2", "blocks.1", "blocks.0"]
    assert recomputed(policy="every_k", every=3) == ["blocks.2"]
    assert recomputed(policy="full", blocks=["blocks.1"]) == ["blocks.1"]
    assert recomputed(policy="every_k", every=1) == ["blocks.2", "blocks.1", "blocks.0"]
    assert recomputed(policy="full", cpu_checkpointing=True) == 3 * ["to_host"] + ["blocks.2", "blocks.1", "blocks.0"]


@alive("activation_checkpointing.policy")
def test_selective_recomputation_keeps_matrix_products() -> None:
    """Recomputed whole, a block calls its three modules again; and its products run again unless they were kept."""

    def products(policy: str) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        with engine_for(
            build(odd=False), configuration(activation_checkpointing={"policy": policy}), **ALONE
        ) as engine:
            loss = engine(batches(1, 1, 1)[0, 0, 0])
            with FlopCounterMode(display=False) as counter:
                engine.backward(loss)
        return counter.get_total_flops()

    assert products("full") > products("selective") == products("none")


# --- checkpoints


def saved(rank: int, folder: str, validation: str) -> str:
    """What comes of tags that differ."""
    with engine_for(Layers(1), configuration(checkpoint={"tag_validation": validation})) as engine:
        train(engine, 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                engine.save_checkpoint(folder, tag=f"tag{rank}")
            except RuntimeError as error:
                return f"failed: {error}"
    return "warned" if any("tag1" in str(warning.message) for warning in told) else "silent"


@alive("checkpoint.tag_validation")
def test_tag_validation(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, saved, str(tmp_path), "Ignore") == ["silent", "silent"]
    assert ranks.run(2, saved, str(tmp_path), "Warn") == ["warned", "silent"]
    assert all(text.startswith("failed: ") for text in ranks.run(2, saved, str(tmp_path), "Fail"))


@alive("zero_optimization.stage3_gather_16bit_weights_on_model_save")
def test_gather_16bit_weights_on_model_save(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, saved_whole, str(tmp_path / "no"), False) == [False, False]
    assert not (tmp_path / "no").exists()
    assert ranks.run(2, saved_whole, str(tmp_path / "yes"), True) == [True, True]
    weights = torch.load(tmp_path / "yes" / "pytorch_model.bin")
    assert [weight.numel() for weight in weights.values()] == [LAYER] * 4


def saved_whole(rank: int, folder: str, gather: bool) -> bool:
    config = configuration(3, zero={"stage3_gather_16bit_weights_on_model_save": gather})
    with warnings.catch_warnings(), engine_for(Layers(), config) as engine:
        warnings.simplefilter("ignore")
        return engine.save_16bit_model(folder)
