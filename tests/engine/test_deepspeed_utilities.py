"""What DeepSpeed's users ask an engine beside training: a parameter's fp32 weight, gradient and states, whatever
divides them; state dicts; loaders."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine import Engine
from dsprof.engine.checkpoint import CheckpointError, weights_of
from dsprof.engine.deepspeed import fragments, groups, start, zero, zero_to_fp32

RANKS = 2
LR = 0.1


class Tied(nn.Module):
    """Two names for one weight, a buffer, a frozen parameter, and one of three elements that two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale.sum().to(self.embedding.weight.dtype) + self.frozen
        out: Tensor = nn.functional.cross_entropy(self.head(x).float(), ids)
        return out


def data(rank: int) -> Tensor:
    return torch.tensor([rank, rank + 1, 4])


def engine_for(stage: int, **more: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "adam_w_mode": False}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 3, **more.pop("zero", {})},
        **more,
    }
    model = Tied()
    return start.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def expected() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of all ranks' data in one process, and weights after a step of Adam, the first."""
    model = Tied()
    sum(model(data(rank)) / RANKS for rank in range(RANKS)).backward()  # type: ignore[union-attr]
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.Adam(model.parameters(), lr=LR).step()
    return grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def _looks(rank: int, stage: int, more: dict[str, Any]) -> None:
    engine = engine_for(stage, **more)
    params = dict(engine.module.named_parameters())
    grads, weights = expected()
    half = any(key in more for key in ("bf16", "fp16"))
    close: dict[str, float] = {"atol": 0.02, "rtol": 0.02} if half else {"atol": 1e-6, "rtol": 1e-5}
    for param in params.values():
        assert fragments.safe_get_full_grad(param) is None
    with pytest.raises(ValueError, match=r"has no optimizer state 'exp_avg'; it has none before its first step"):
        fragments.safe_get_full_optimizer_state(params["scale"], "exp_avg")
    engine.backward(engine(data(rank)))
    for name, param in params.items():
        grad = fragments.safe_get_full_grad(param)
        assert (grad is None) == (name == "frozen")
        if grad is not None:
            torch.testing.assert_close(grad, grads[name], **close)
    engine.step()
    for name, param in params.items():
        weight = fragments.safe_get_full_fp32_param(param)
        assert weight is not None
        assert weight.dtype == torch.float32
        # Adam's first step is the sign of the gradient, where there is one.
        if name == "scale" or not half:
            torch.testing.assert_close(weight, weights[name], **close)
        assert fragments.safe_get_full_grad(param) is None
    moment = fragments.safe_get_full_optimizer_state(params["scale"], "exp_avg")
    torch.testing.assert_close(moment, 0.1 * grads["scale"], **close)
    with pytest.raises(ValueError, match="it has exp_avg, exp_avg_sq"):
        fragments.safe_get_full_optimizer_state(params["scale"], "momentum")
    pieces = [fragments.safe_get_local_optimizer_state(params["scale"], "exp_avg"),
              fragments.safe_get_local_fp32_param(params["scale"])]  # fmt: skip
    assert [len(piece) for piece in pieces if piece is not None] == [3 if stage == 0 else 2 - rank] * 2
    engine.destroy()
    assert fragments.safe_get_full_fp32_param(params["scale"]) is None


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {"bf16": {"enabled": True}}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, {}),
        (3, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    ],
)
def test_weights_gradients_and_states_are_whole_for_who_asks(ranks: Ranks, stage: int, more: dict[str, Any]) -> None:
    ranks.run(RANKS, _looks, stage, more)


def _writes(rank: int, stage: int, more: dict[str, Any]) -> None:
    engine = engine_for(stage, **more)
    scale, table = engine.module.scale, engine.module.embedding.weight
    assert isinstance(scale, nn.Parameter)
    assert isinstance(table, nn.Parameter)
    with pytest.raises(ValueError, match=r"scale has no gradient to be replaced: call this between engine\.backward"):
        fragments.safe_set_full_grad(scale, torch.zeros(3))
    engine.backward(engine(data(rank)))
    with pytest.raises(ValueError, match=r"scale: a value of shape \(2,\) was given for one of \(3,\)"):
        fragments.safe_set_full_grad(scale, torch.zeros(2))
    fragments.safe_set_full_grad(scale, torch.tensor([1.0, -1.0, 0.0]))
    fragments.safe_update_full_grad_vectorized([table], lambda grad, _: torch.ones_like(grad))
    before = fragments.safe_get_full_fp32_param(table)
    assert before is not None
    engine.step()
    step = {"atol": 1e-5, "rtol": 0.0}
    torch.testing.assert_close(fragments.safe_get_full_fp32_param(scale), torch.tensor([0.9, 2.1, 3.0]), **step)
    torch.testing.assert_close(fragments.safe_get_full_fp32_param(table), before - LR, **step)

    fragments.safe_set_full_optimizer_state(scale, torch.tensor([7.0, 8.0, 9.0]), "exp_avg")
    assert_is(fragments.safe_get_full_optimizer_state(scale, "exp_avg"), [7, 8, 9])
    fragments.safe_set_full_fp32_param(scale, torch.tensor([4.0, 5.0, 6.0]))
    assert_is(fragments.safe_get_full_fp32_param(scale), [4, 5, 6])
    fragments.safe_set_full_fp32_param(table, torch.arange(20.0).view(5, 4))
    with zero.GatheredParameters([scale, table, None]):
        assert_is(scale.float(), [4, 5, 6])
        assert_is(table.float().view(-1), range(20))
    if stage:
        piece = [10.0, 11.0][: 2 - rank]
        fragments.safe_set_local_fp32_param(scale, torch.tensor(piece) + 5 * rank)
        assert_is(fragments.safe_get_full_fp32_param(scale), [10, 11, 15])
        with zero.GatheredParameters(scale):
            assert_is(scale.float(), [10, 11, 15])
        fragments.safe_set_local_optimizer_state(scale, torch.tensor(piece), "exp_avg_sq")
        assert_is(fragments.safe_get_full_optimizer_state(scale, "exp_avg_sq"), [10, 11, 10])
    engine.destroy()


def assert_is(found: Tensor | None, values: Any) -> None:
    assert found is not None
    assert found.tolist() == list(values)


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (2, {"bf16": {"enabled": True}}), (3, {"zero": {"stage3_param_persistence_threshold": 0}})],
)
def test_what_is_written_is_what_the_training_goes_on_from(ranks: Ranks, stage: int, more: dict[str, Any]) -> None:
    ranks.run(RANKS, _writes, stage, more)


def _on_disk(rank: int, folder: str) -> None:
    offload = {"device": "nvme", "nvme_path": folder}
    engine = engine_for(3, bf16={"enabled": True}, zero={"offload_optimizer": offload, "offload_param": offload})
    engine.backward(engine(data(rank)))
    engine.step()
    table = engine.module.embedding.weight
    assert isinstance(table, nn.Parameter)
    assert fragments.safe_get_full_optimizer_state(table, "exp_avg_sq") is not None
    fragments.safe_set_full_fp32_param(table, torch.arange(20.0).view(5, 4))
    assert_is(fragments.safe_get_full_fp32_param(table).view(-1), range(20))  # type: ignore[union-attr]
    with zero.GatheredParameters(table):
        assert_is(table.float().view(-1), range(20))
    engine.destroy()


def test_parameters_and_states_on_disk_are_read_and_written(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(RANKS, _on_disk, str(tmp_path))


# --- state dicts


def _saves(rank: int, folder: str) -> None:
    for stage, half in ((3, True), (1, False)):
        engine = engine_for(stage, bf16={"enabled": half}, zero={"stage3_gather_16bit_weights_on_model_save": True})
        engine.backward(engine(data(rank)))
        engine.step()
        assert engine.zero_gather_16bit_weights_on_model_save()
        engine.save_checkpoint(f"{folder}/{stage}", tag="one")
        whole = engine._zero3_consolidated_16bit_state_dict()
        without = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if rank == 0:
            torch.save({name: value.float() for name, value in whole.items()}, f"{folder}/{stage}/whole.pt")
            assert whole.keys() - without.keys() == {"frozen"}
        else:
            assert whole == without == {}
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"in ZeRO stage 3 parameters are sharded: write engine\.save_16bit"):
                engine.module_state_dict()
        else:
            assert engine.module_state_dict().keys() == Tied().state_dict().keys()
            assert "frozen" not in engine.module_state_dict(exclude_frozen_parameters=True)
        engine.load_module_state_dict(Tied().state_dict())
        assert_is(fragments.safe_get_full_fp32_param(engine.module.scale), [1, 2, 3])  # type: ignore[arg-type]
        engine.destroy()


def test_a_checkpoint_is_read_without_an_engine(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(RANKS, _saves, str(tmp_path))
    for stage, tolerance in ((3, 0.01), (1, 0.0)):
        folder = tmp_path / str(stage)
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        whole = torch.load(folder / "whole.pt")
        assert state.keys() == Tied().state_dict().keys() == whole.keys()
        assert {value.dtype for name, value in state.items() if name != "seen"} == {torch.float32}
        assert state["head.weight"] is state["embedding.weight"]
        for name, value in state.items():
            torch.testing.assert_close(value.float(), whole[name], atol=tolerance, rtol=tolerance)
        trained = weights_of(folder, "one", without_frozen=True)
        assert state.keys() - trained.keys() == {"frozen"}
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), folder, "one")
        torch.testing.assert_close(model.get_parameter("scale").detach(), state["scale"])
    with pytest.raises(CheckpointError, match=r"there is no file .*latest: check the folder, or give a tag"):
        weights_of(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint two in"):
        weights_of(tmp_path / "3", "two")

    # 80 bytes of the table, twelve of the scale, sixteen of the frozen one, 24 of the buffer.
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path / "3", tmp_path / "one")
    state = weights_of(tmp_path / "3")
    assert torch.load(tmp_path / "one" / "pytorch_model.bin").keys() == state.keys()
    convert(tmp_path / "3", tmp_path / "many", max_shard_size="100B", exclude_frozen_parameters=True)
    index = json.loads((tmp_path / "many" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == state.keys() - {"frozen"}
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / "many" / file)[name], state[name])
    with pytest.raises(ValueError, match=r"write model\.save_pretrained\(output_dir, state_dict=get_fp32"):
        convert(tmp_path / "3", tmp_path / "x", safe_serialization=True)
    with pytest.raises(ValueError, match="max_shard_size='5 bits'"):
        convert(tmp_path / "3", tmp_path / "x", max_shard_size="5 bits")


# --- zero.Init, loaders


def _made_early(rank: int) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    with zero.Init(config_dict_or_path=config):
        made = nn.Linear(4, 3)
    assert made.weight.dtype == torch.bfloat16
    assert made.weight.untyped_storage().nbytes() < 2 * 12
    with zero.GatheredParameters([made.weight, None]):
        assert torch.isfinite(made.weight).all()


def test_a_model_is_made_before_all_of_its_configuration_is_known(ranks: Ranks) -> None:
    ranks.run(RANKS, _made_early)


def _loads(rank: int) -> list[list[int]]:
    engine = engine_for(0)
    samples: Any = list(range(8))
    loader = engine.deepspeed_io(samples, batch_size=2, route="eval", num_local_io_workers=0)
    with pytest.raises(ValueError, match="route='test'; write train, eval or predict"):
        engine.deepspeed_io(samples, route="test")
    engine.destroy()
    dist.barrier()
    return [batch.tolist() for batch in loader]


def test_deepspeed_io_makes_a_loader_for_evaluation(ranks: Ranks) -> None:
    assert ranks.run(RANKS, _loads) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


# --- layers sharded over ranks


TP = 2


def _perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 3, generator=generator)


def _as_transformers_has_it(rank: int) -> tuple[list[float], list[str]]:
    """Trainer hands its whole configuration to tp_model_init, with the samples of all ranks as `train_batch_size`."""
    config = {
        "train_batch_size": 2 * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": TP},
    }
    with pytest.raises(RuntimeError, match=r"groups\.get_data_parallel_rank: there is no engine yet; call deepspeed"):
        groups.get_data_parallel_rank()
    model = start.tp_model_init(model=_perceptron(), tp_size=TP, dtype=torch.float32, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start.initialize(model=model, optimizer=optimizer, config_params=config)[0]
    assert config["train_batch_size"] == 2 * dist.get_world_size()
    assert engine.train_batch_size() == 2 * dist.get_world_size() // TP
    losses = []
    for step in range(3):
        x, y = _batch(step, groups.get_data_parallel_rank())
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=groups.get_data_parallel_group())
        losses.append(total.item() / groups.get_data_parallel_world_size())
    _check_groups(rank)
    engine.destroy()
    return losses, [str(warning.message) for warning in caught if "train_batch_size" in str(warning.message)]


def _check_groups(rank: int) -> None:
    """Four ranks of which two share layers, or two that do: a group of one is not all of them."""
    assert groups.get_tensor_model_parallel_world_size() == TP
    assert groups.get_tensor_model_parallel_rank() == rank % TP
    assert groups.get_tensor_model_parallel_src_rank() == rank // TP * TP
    assert groups.get_data_parallel_group_ranks() == list(range(rank % TP, dist.get_world_size(), TP))
    assert groups.get_broadcast_src_rank() == rank % TP
    for group, ranks in (
        (groups.get_tensor_model_parallel_group(), [rank // TP * TP, rank // TP * TP + 1]),
        (groups.get_data_parallel_group(), groups.get_data_parallel_group_ranks()),
    ):
        assert dist.get_process_group_ranks(group) == ranks
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_tp_model_init_shards_layers_as_transformers_calls_it(ranks: Ranks, world_size: int) -> None:
    replicas = world_size // TP
    model = _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    expected = []
    for step in range(3):
        x, y = (torch.cat(both) for both in zip(*(_batch(step, replica) for replica in range(replicas)), strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    told = (
        f"train_batch_size = {2 * world_size} counts each sample once for each of the 2 ranks that share its layers; a "
        f"step takes {2 * replicas} samples (2 x 1 micro-batches x {replicas} replicas)"
    )
    for rank, (losses, said) in enumerate(ranks.run(world_size, _as_transformers_has_it)):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert said == ([told] if rank == 0 else [])
