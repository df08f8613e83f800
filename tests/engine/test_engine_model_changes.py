"""What scripts do to a model and its optimizer behind the engine's back: it is trained as torch does, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine as ds

WIDTH = 6


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))


def sample(number: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def start(model: nn.Module, stage: int, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> Any:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **more}
    if optimizer is None:
        config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.1}})
    return ds.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, number: int, rank: int) -> None:
    engine.backward(engine(sample(number, rank)).pow(2).mean())
    engine.step()


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: int, clip: float) -> float:
    """As all ranks together; the norm of the gradients."""
    optimizer.zero_grad()
    torch.stack([model(sample(number, rank)).pow(2).mean() for rank in range(ranks)]).mean().backward()
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(stepped, clip).item()
    optimizer.step()
    return norm


def difference(engine: Any, expected: nn.Module) -> float:
    with ds.zero.GatheredParameters(engine.module.parameters()):
        pairs = zip(engine.module.parameters(), expected.parameters(), strict=True)
        return max((mine.float() - other.float()).abs().max().item() for mine, other in pairs)


# --- parameter groups that change


def regroups(rank: int, stage: int) -> tuple[float, float, list[str]]:
    """Add a layer to the optimizer after a step, and take one out after two more."""
    model, expected = build(), build()
    optimizers = [torch.optim.SGD(each[0].parameters(), lr=0.1, momentum=0.9) for each in (model, expected)]
    engine = start(model, stage, optimizers[0], gradient_clipping=0.05)
    worst = 0.0
    for number in range(4):
        if number == 1:
            for each, optimizer in zip((model, expected), optimizers, strict=True):
                optimizer.add_param_group({"params": list(each[2].parameters()), "lr": 0.01})
        if number == 3:
            for optimizer in optimizers:
                optimizer.param_groups[0]["params"].pop(0)
        train(engine, number, rank)
        norm = train_alone(expected, optimizers[1], number, 3, 0.05)
        worst = max(worst, abs(engine.get_global_grad_norm() - norm))
    said = []
    for strange in (nn.Parameter(torch.ones(2)), model[2].bias):
        if stage == 0 and strange is model[2].bias:
            continue  # torch sees that itself, the master being the parameter
        optimizers[0].add_param_group({"params": [strange]})
        with pytest.raises(ValueError, match="the optimizer's parameter group 2") as error:
            train(engine, 9, rank)
        said.append(str(error.value))
        optimizers[0].param_groups.pop()
    return worst, difference(engine, expected), said


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_groups_that_come_later_are_trained_and_those_that_go_are_not(ranks: Ranks, stage: int) -> None:
    for norm, weights, said in ranks.run(3, regroups, stage):
        assert norm < 1e-6
        assert weights < 1e-6
        assert "of shape (2,) that the engine does not train" in said[0]
        assert stage == 0 or said[1].endswith(f"of shape ({WIDTH},) that another one has, too")


@pytest.mark.parametrize("kind", ["Muon", "OneBitAdam"])
def test_optimizers_that_settle_their_groups_say_so(kind: str) -> None:
    model = build()
    config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.1}}}
    engine = ds.initialize(model=model, model_parameters=model[0].parameters(), config=config)[0]
    group = {"params": list(model[2].parameters()), "use_muon": False}
    engine.optimizer.add_param_group(group)
    engine.backward(engine(sample(0, 0)).sum())
    with pytest.raises(ValueError, match=f"{kind} settles its parameter groups when it is made"):
        engine.step()


# --- an evaluation before the first step


def evaluates_first(rank: int, zero: dict[str, Any]) -> float:
    model, expected = build(), build()
    engine = start(model, 3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0, **zero})
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    with torch.inference_mode():
        engine(sample(0, rank))
    for number in range(3):
        train(engine, number, rank)
        train_alone(expected, optimizer, number, 2, 1e9)
    return difference(engine, expected)


@pytest.mark.parametrize("kind", ["memory", "disk", "hpZ"])
def test_an_evaluation_in_inference_mode_leaves_nothing_that_training_cannot_use(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    disk = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}}
    zero = {"memory": {}, "disk": disk, "hpZ": {"zero_hpz_partition_size": 2}}[kind]
    assert max(ranks.run(2, evaluates_first, zero)) < 1e-6


# --- weights that the script writes


def edits(rank: int, stage: int, more: dict[str, Any], folder: str) -> tuple[bool, bool, bool, float]:
    """Write one layer's weights between steps of a model in bf16."""
    model = build()
    engine = start(model, stage, bf16={"enabled": True}, **more)
    engine.backward(engine(sample(0, rank).bfloat16()).float().pow(2).mean())
    engine.step()
    before = {p.name: p.master.detach().clone() for p in engine.zero.params}
    fine = any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
    with torch.no_grad():
        model[0].weight.fill_(0.25)
        model[0].bias[:3] = 0.5
    engine.save_checkpoint(folder, "edited")
    masters = {p.name: p.master.detach() for p in engine.zero.params}
    kept = all(torch.equal(masters[name], before[name]) for name in ("2.weight", "2.bias"))
    written = bool((masters["0.weight"] == 0.25).all())
    engine.optimizer.param_groups[0]["lr"] = 0.0
    model.load_state_dict({name: torch.full_like(value, 0.125) for name, value in model.state_dict().items()})
    engine.backward(engine(sample(1, rank).bfloat16()).float().pow(2).mean())
    engine.step()
    return fine, kept, written, max((value.float() - 0.125).abs().max().item() for value in model.state_dict().values())


@pytest.mark.parametrize("stage", [0, 2])
def test_weights_written_in_half_precision_reach_the_masters(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    assert ranks.run(2, edits, stage, {}, str(tmp_path)) == [(True, True, True, 0.0)] * 2


def writes_data(rank: int, stage: int, dtype: str) -> list[float]:
    """Clamp and mask weights as torch does not count it, between steps that change nothing themselves."""
    model = build()
    engine = start(
        model, stage, torch.optim.SGD(model.parameters(), lr=0.0), **{dtype: {"enabled": True}}, gradient_clipping=0.0
    )
    kept = []
    for step in range(3):
        engine.backward(engine(sample(step, rank).to(model[0].weight.dtype)).float().pow(2).mean())
        if step == 0:
            model[0].weight.data.clamp_(-0.0625, 0.0625)
        engine.step()
        if step == 1:
            model[2].weight.data[3] = 0.0
        kept += [model[0].weight.abs().max().item(), model[2].weight[3].abs().max().item()]
    return kept


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "fp16"), (2, "bf16")])
def test_weights_written_through_data_reach_the_masters(ranks: Ranks, stage: int, dtype: str) -> None:
    for first, _, second, _, third, masked in ranks.run(2, writes_data, stage, dtype):
        assert (first, second, third, masked) == (0.0625, 0.0625, 0.0625, 0.0)


# --- parameters that the script puts elsewhere


def moves(rank: int, stage: int, half: bool, folder: str) -> tuple[float, float]:
    """There and back by several ways, between steps; how much the weights change in the end, and are off."""
    model, expected = build(), build()
    more = {"bf16": {"enabled": True}} if half else {}
    persistent = {"stage": stage, "stage3_param_persistence_threshold": 50} if stage == 3 else {"stage": stage}
    engine = start(model, stage, zero_optimization=persistent, **more)
    kind = torch.bfloat16 if half else torch.float32
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)

    def clamp(of: nn.Module) -> None:
        of[0].weight.data = of[0].weight.data.clamp(-0.25, 0.25)

    ways: list[Callable[[nn.Module], Any]] = [
        lambda of: of.to(torch.float64).to(kind if of is model else torch.float32),
        lambda of: of[0].double().to(kind if of is model else torch.float32),
        clamp,
    ]
    for number in range(4):
        engine.backward(engine(sample(number, rank).to(kind)).float().pow(2).mean())
        engine.step()
        train_alone(expected, optimizer, number, 2, 1e9)
        for each in (model, expected):
            ways[number % 3](each)
        if number == 2:
            engine.save_checkpoint(folder, "moved")
    engine.load_checkpoint(folder, "moved")
    engine.backward(engine(sample(3, rank).to(kind)).float().pow(2).mean())
    before = [param.detach().clone() for param in model.parameters()]
    engine.step()
    changed = min((old - new).abs().max().item() for old, new in zip(before, model.parameters(), strict=True))
    return changed, difference(engine, expected)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_are_moved_there_and_back_are_trained_on(
    ranks: Ranks, stage: int, half: bool, tmp_path: Path
) -> None:
    for changed, off in ranks.run(2, moves, stage, half, str(tmp_path)):
        assert changed > 1e-5
        assert off < (5e-3 if half else 1e-6)


def channels_last(rank: int, stage: int) -> float:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    expected = copy.deepcopy(model)
    engine = start(model, stage, zero_optimization={"stage": stage}, gradient_clipping=0.0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    for number in range(3):
        if number == 1:
            model.to(memory_format=torch.channels_last)
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        optimizer.zero_grad()
        others = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(other)) for other in range(2)]
        torch.stack([expected(each).pow(2).mean() for each in others]).mean().backward()
        optimizer.step()
    return difference(engine, expected)


def transposes(rank: int, stage: int) -> float:
    """Between two steps; the same memory in another order."""

    def square() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    model, alone = square(), square()
    engine = start(model, stage, gradient_clipping=0.0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        train(engine, step, rank)
        train_alone(alone, optimizer, step, 2, 1e9)
        if step == 0:
            for each in (model, alone):
                each[0].weight.data = each[0].weight.data.t()
    return difference(engine, alone)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_is_transposed_in_place_is_trained_on(ranks: Ranks, stage: int) -> None:
    assert max(ranks.run(2, transposes, stage)) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_memory_format_is_trained_on(ranks: Ranks, stage: int) -> None:
    assert max(ranks.run(2, channels_last, stage)) < 1e-6


def narrows(rank: int, stage: int, folder: str) -> tuple[list[str], float]:
    model, expected = build(), build()
    engine = start(model, stage, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 10})
    train(engine, 0, rank)
    train_alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 0, 2, 1e9)
    said = []
    if stage == 3:  # 2 of 4 parameters come and go, and say that themselves
        said.append(refused(model.half))
        model[0].bias.data, model[2].bias.data = model[0].bias.data.half(), model[2].bias.data.half()
    else:
        model.half()
        engine.backward(engine(sample(1, rank).half()).float().pow(2).mean())
        said.append(refused(engine.step))
    engine.save_checkpoint(folder, "narrow")  # has what the engine trains
    engine.load_checkpoint(folder, "narrow")
    off = difference(engine, expected)
    train(engine, 1, rank)
    return said, off


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_precision_is_refused_by_name(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    for said, off in ranks.run(2, narrows, stage, str(tmp_path)):
        if stage == 3:
            assert "the parameter 0.weight is sharded (ZeRO stage 3)" in said[0]
        else:
            assert said[0].startswith("engine.step: 0.weight is torch.float16 (7, 6) on cpu, and was torch.float32 (7,")
        assert off < (1e-3 if stage == 0 else 1e-6)  # where what is trained is the parameter itself


# --- what cannot be trained is refused


def refused(use: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        use()
    return str(error.value)


def misuses(rank: int, stage: int) -> list[str]:
    model = build()
    engine = start(model, stage)
    train(engine, 0, rank)
    engine.backward(engine(sample(1, rank)).pow(2).mean())
    said = [refused(engine.optimizer.step)]
    engine.step()
    model.append(nn.Linear(WIDTH, WIDTH))
    said.append(refused(lambda: train(engine, 2, rank)))
    optimizer = engine.optimizer
    engine.destroy()
    optimizer.step()  # the script's own again
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_of_the_optimizer_and_new_parameters_are_refused(ranks: Ranks, stage: int) -> None:
    for said in ranks.run(2, misuses, stage):
        assert said == [
            "optimizer.step: the engine steps the optimizer: write engine.backward(loss) and engine.step() in the "
            "place of loss.backward(), optimizer.step() and optimizer.zero_grad()",
            "engine.step: 3.weight came into the model after the engine was made, and has a gradient, which nothing "
            "would use: build the whole model before initialize, or call engine.destroy and initialize anew",
        ]


def test_a_layer_that_is_replaced_is_refused_and_one_without_gradients_is_not() -> None:
    model = build()
    engine = start(model, 0)
    model.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    train(engine, 0, 0)
    model[2] = nn.Linear(7, WIDTH)
    with pytest.raises(RuntimeError, match=r"engine\.step: 2\.weight came into the model after"):
        train(engine, 1, 0)


def test_parameters_in_the_same_memory_are_refused_and_parts_of_one_tensor_are_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    for more in ({}, {"bf16": {"enabled": True}}):
        with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are two parameters in the same memory"):
            start(model, 1, **more)
    whole = torch.randn(4, 8)
    model[0].weight, model[1].weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    start(model, 1)


def compiles(rank: int) -> str:
    return refused(start(build(), 3).compile)


def test_compiling_is_refused_where_parameters_come_and_go(ranks: Ranks) -> None:
    for said in ranks.run(2, compiles):
        assert said.startswith("engine.compile: ZeRO stage 3 fetches parameters while modules run")
    expected, model = build(), build()
    engine = start(model, 1)
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    train(engine, 0, 0)
    train_alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 0, 1, 1e9)
    assert difference(engine, expected) < 1e-6


# --- data that end within a step


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).pow(2).mean()
        return loss


def runs_out(rank: int, stage: int) -> tuple[float, tuple[int, int, int]]:
    """Data for one step and a half; then for another."""
    expected = Loss()
    engine = start(Loss(), stage, gradient_accumulation_steps=2)
    data = iter([sample(number, rank) for number in range(3)])
    engine.train_batch(data)
    with pytest.raises(StopIteration):
        engine.train_batch(data)
    engine.train_batch(iter([sample(3, rank), sample(4, rank)]))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for numbers in ((0, 1), (3, 4)):
        optimizer.zero_grad()
        torch.stack([expected(sample(number, other)) for number in numbers for other in range(2)]).mean().backward()
        optimizer.step()
    return difference(engine, expected), (engine.global_steps, engine.micro_steps, engine.global_samples)


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_of_a_step_that_the_data_do_not_fill_are_forgotten(ranks: Ranks, stage: int) -> None:
    for weights, counts in ranks.run(2, runs_out, stage):
        assert weights < 1e-6
        assert counts == (2, 4, 16)
