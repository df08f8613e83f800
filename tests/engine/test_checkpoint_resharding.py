"""Checkpoints of models that no rank has the whole of: between any two ways of dividing ranks, and back."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from engines import save_on_small_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_models import (
    MICROBATCHES,
    VOCABULARY,
    WIDTH,
    Block,
    batches,
    configuration,
    examples,
    loss_of,
    project,
    weights,
)
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.checkpoint import CheckpointError
from dsprof.engine.checkpoint.dcp import Contents, Piece, write
from dsprof.engine.checkpoint.folder import unpack
from dsprof.engine.checkpoint.state import Wanted, join, part_name, read, tensor_shard
from dsprof.engine.comm.consensus import World
from dsprof.engine.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsprof.engine.tensor import TensorShard

PLACES: Final = 9


class Places(nn.Module):
    """Adds to each element one of an odd number of vectors, which are padded where they are sharded; counts its
    calls."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(PLACES, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.places(torch.arange(x.shape[1], device=x.device))


class Shift(nn.Module):
    """Adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Gain(nn.Module):
    """A 0-d parameter, a frozen one, one that is never used, and a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.same = Shift(), Shift()
        self.same.offset = self.shift.offset
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(x * self.gain * self.frozen)


class NoisyBlock(Block):
    """Its output depends on random numbers, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * torch.rand(())) if self.training else super().forward(x)


def layers(block: type[Block] = Block) -> list[Any]:
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Places),
        *(LayerSpec(block, WIDTH, attention=number == 1) for number in range(4)),
        LayerSpec(Gain),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=project),
    ]


class Layout(NamedTuple):
    """How ranks are divided, and what else decides where the state is."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    stage: int = 0
    zero: dict[str, Any] = {}  # noqa: RUF012
    virtual: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def config(self, **more: Any) -> dict[str, Any]:
        zero = {"stage": self.stage, **({"stage3_param_persistence_threshold": 20} if self.stage == 3 else {})}
        schedule = {"pipeline": {"schedule": "interleaved"}} if self.virtual > 1 else {}
        tensor = {"tensor_parallel": {"autotp_size": self.tp}} if self.tp > 1 else {}
        if self.tp > 1 and self.pp == 1:
            tensor["tensor_parallel"]["plan"] = {"*.places": "vocab", "tied_modules.*": "whole", "*": "auto"}
        accumulate = {"gradient_accumulation_steps": MICROBATCHES // self.dp}
        return configuration(zero_optimization=zero | self.zero, **schedule, **tensor, **accumulate) | more


def start(layout: Layout, block: type[Block] = Block, dtype: torch.dtype | None = None, **more: Any) -> Any:
    torch.manual_seed(1)
    row = PipelineModule(
        layers(block), layout.pp, loss_fn=loss_of, seed_layers=True, virtual_stages=layout.virtual,
        partition_method="uniform",
    ).to(dtype)  # fmt: skip
    return initialize(row, layout.config(**more))


def initialize(model: nn.Module, config: dict[str, Any], optimizer: Any = None) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = ds.initialize(model=model, config=config | {"steps_per_print": None}, optimizer=optimizer)
    return engine


def data(steps: int) -> Tensor:
    """Token ids [step, micro-batch, samples, length], whatever the layout."""
    return batches(1, MICROBATCHES, steps)[:, :, 0]


def train(engine: Any, steps: range) -> None:
    mesh = engine.parallel.mesh
    for step in data(steps.stop)[steps.start :]:
        engine.train_batch(iter(examples(step)[mesh.dp_rank :: mesh.dp]))


def value(path: Path, name: str) -> Any:
    return unpack(Contents(path).value(name), name)


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, flattened."""
    contents, found = Contents(path), {}
    for name, about in contents._metadata.state_dict_metadata.items():
        if hasattr(about, "size"):
            found[name] = torch.full((about.size[0],), 77, dtype=about.properties.dtype)
    contents.read([Piece(name, flat, flat.numel()) for name, flat in found.items()])
    return found


def wholes(path: Path) -> dict[str, Tensor]:
    """The same, with the whole of those that are in parts."""
    found = tensors(path)
    for param, saved in value(path, "training")["cuts"].items():
        cut = TensorShard.from_dict(saved)
        first = f"@0/{cut.num_shards}"
        for key in [name.removesuffix(first) for name in found if name.endswith(f"/{param}{first}")]:
            parts = [found.pop(f"{key}@{number}/{cut.num_shards}") for number in range(cut.num_shards)]
            found[key] = join(cut, parts).reshape(-1)
    assert len(found) > 40
    assert not [name for name in found if "@" in name]
    return found


def differences(one: Path, other: Path, contents: Callable[[Path], dict[str, Tensor]] = wholes) -> list[str]:
    """Names of the tensors in which two checkpoints differ."""
    first, second = contents(one), contents(other)
    return [name for name in first.keys() | second.keys()
            if name not in first or name not in second or not torch.equal(first[name], second[name])]  # fmt: skip


# --- on ranks that are divided otherwise


LAYOUTS: Final = [
    Layout(),
    Layout(2, 2, 1, stage=3),
    Layout(1, 2, 2, stage=1),
    Layout(2, 2, 1, stage=1, virtual=2),
    Layout(1, 1, 4, stage=1),
    Layout(2, 1, 2, stage=2),
    Layout(),
]
"""A training goes from each to the next."""


@functools.cache
def reference(steps: int) -> dict[str, Tensor]:
    """The weights after training in one process, in float64."""
    whole = PipelineModule(layers(), loss_fn=loss_of, seed_layers=True)
    whole.partition_method = "uniform"
    whole.arrange(1, 0)
    whole.double()
    optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in data(steps):
        optimizer.zero_grad()
        for inputs, labels in examples(step):
            (loss_of(whole(inputs), labels) / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in whole.named_parameters()}


Loaded = dict[str, tuple[TensorShard | None, Tensor]]
"""The parameters that a rank has, by name."""


def moved(rank: int, folder: Path, layout: Layout, step: int) -> Loaded:
    """Go on from the checkpoint before `step`, save what was loaded, train for a step, and save that."""
    engine = start(layout, dtype=torch.float64)
    loaded: Loaded = {}
    if step:
        train(engine, range(1))  # so that there is something to be replaced
        engine.load_checkpoint(folder, str(step))
        engine.save_checkpoint(folder, "again")
        for param in engine.zero.params:
            engine.zero.gatherer.gather([p for p in [param] if not p.resident], 10**9)
            loaded[param.name] = tensor_shard(param), param.param.detach().view(-1).clone()
        assert (engine.global_steps, engine.get_lr()) == (step, [1e-2])
    train(engine, range(step, step + 1))
    engine.save_checkpoint(folder, str(step + 1))
    engine.destroy()
    return loaded


LARGE: Final = [
    *(Layout(2, 2, 2, stage=stage) for stage in range(4)),
    Layout(1, 4, 1, stage=2, zero={"round_robin_gradients": True}),
    Layout(1, 2, 2, stage=3),
] + [
    layout
    for pp, dp, tp in itertools.product((1, 2, 4, 8), repeat=3)
    for layout in (Layout(pp, dp, tp), Layout(pp, dp, tp, stage=3), Layout(1, 1, 1))
    if pp * dp * tp == 8 and (pp <= 2 or tp == 1) and dp <= MICROBATCHES
]  # fmt: skip


def go_through(ranks: Ranks, layouts: list[Layout], folder: Path) -> None:
    for step, layout in enumerate(layouts):
        found = ranks.run(layout.ranks, moved, folder, layout, step)
        if step:
            assert differences(folder / str(step), folder / "again") == [], (step, layout)
            saved = wholes(folder / str(step))
            for name, (cut, part) in [loaded for of_rank in found for loaded in of_rank.items()]:
                whole = saved[f"weight/{name}"]
                assert torch.equal(part, whole if cut is None else cut.take(whole.view(cut.shape)).reshape(-1)), name
    last = wholes(folder / str(len(layouts)))
    for name, expected in reference(len(layouts)).items():
        assert (last[f"weight/{name}"] - expected.view(-1)).abs().max() < 1e-9, name


def test_a_training_that_moves_from_layout_to_layout_is_the_references(ranks: Ranks, tmp_path: Path) -> None:
    go_through(ranks, LAYOUTS, tmp_path)


@pytest.mark.slow
def test_a_training_that_moves_through_all_layouts_of_eight_ranks_is_the_references(
    ranks: Ranks, tmp_path: Path
) -> None:
    go_through(ranks, LARGE, tmp_path)


# --- on the same


def resumed(rank: int, folder: Path, layout: Layout, more: dict[str, Any]) -> tuple[bool, bool]:
    """Save what four steps come to, and two and two with a checkpoint between them; whether random numbers and the
    order of reduction agree.
    """
    engine = start(layout, NoisyBlock, **more)
    torch.manual_seed(rank // layout.tp)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    train(engine, range(2, 4))
    engine.save_checkpoint(folder, "through", save_latest=False)
    drawn, order = torch.rand(()), engine.zero.reducer.order
    assert (order is None) == (layout.dp == 1)
    engine.destroy()

    again = start(layout, NoisyBlock, **more)
    again.load_checkpoint(folder)
    same_order = again.zero.reducer.order == order
    train(again, range(2, 4))
    again.save_checkpoint(folder, "resumed")
    same = bool(torch.rand(()) == drawn)
    again.destroy()
    return same, same_order


BF16: Final = {"bf16": {"enabled": True}}
RESUMES: Final = {
    "pipeline, stage 1, bf16": (Layout(2, 2, 1, stage=1), BF16),
    "pipeline, 1-bit": (Layout(2, 2, 1), {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}}),
    "pipeline, Muon": (Layout(2, 2, 1, stage=2), {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    "tensor, stage 2": (Layout(1, 2, 2, stage=2), {"optimizer": {"type": "Lion", "params": {"lr": 1e-2}}}),
    "both, fp16": (Layout(2, 1, 2, stage=1), {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "pipeline, Muon" else []) for case in RESUMES]
)
def test_a_resumed_training_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, case: str) -> None:
    layout, more = RESUMES[case]
    if "optimizer" in more:
        more = more | {"gradient_clipping": 0.0}
    assert ranks.run(layout.ranks, resumed, tmp_path, layout, more) == [(True, True)] * layout.ranks
    assert differences(tmp_path / "through", tmp_path / "resumed") == []


def carried(rank: int, folder: Path, layout: Layout, more: dict[str, Any], before: str, after: str) -> None:
    engine = start(layout, **more)
    engine.load_checkpoint(folder, before)
    engine.save_checkpoint(folder, after)
    engine.destroy()


def trained_in(rank: int, folder: Path, layout: Layout, more: dict[str, Any], tag: str, load: str | None) -> None:
    engine = start(layout, **more)
    if load is not None:
        engine.load_checkpoint(folder, load)
    train(engine, range(engine.global_steps, engine.global_steps + 2))
    engine.save_checkpoint(folder, tag)
    engine.destroy()


def test_a_checkpoint_that_is_resharded_and_back_is_bit_identical(ranks: Ranks, tmp_path: Path) -> None:
    """In bf16, with masters and parameters in files, and out of these again."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    offloaded = {"offload_optimizer": nvme, "offload_param": nvme, "sub_group_size": 200}
    home = Layout(2, 2, 1, stage=3, zero=offloaded)
    away = [Layout(1, 2, 2, stage=3, zero=offloaded), Layout(4, 1, 1)]
    ranks.run(4, trained_in, tmp_path, home, BF16, "0", None)
    ranks.run(4, trained_in, tmp_path, home, BF16, "through", "0")
    for number, layout in enumerate([*away, home]):
        ranks.run(layout.ranks, carried, tmp_path, layout, BF16, str(number), str(number + 1))
        assert differences(tmp_path / "0", tmp_path / str(number + 1)) == [], layout
    ranks.run(4, trained_in, tmp_path, home, BF16, "back", str(len(away) + 1))
    assert differences(tmp_path / "through", tmp_path / "back") == []


# --- ordinary models


def ordinary() -> nn.Sequential:
    """A model with a weight that two layers share, and a buffer too."""
    torch.manual_seed(1)
    shift = Shift()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), shift, Block(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), shift)
    model[3].weight = model[0].weight
    return model


ORDINARY: Final = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
INPUTS: Final = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def in_one(rank: int, folder: Path, load: str | None, save: str) -> float:
    """A step of the model by itself, after a checkpoint was loaded; the loss of the next."""
    engine = initialize(ordinary(), ORDINARY)
    if load is not None:
        engine.load_checkpoint(folder, load)
    else:
        engine.module[4].offset.fill_(0.7)
    engine.backward(engine(INPUTS).square().mean())
    engine.step()
    engine.save_checkpoint(folder, save)
    loss = float(engine(INPUTS).square().mean())
    engine.destroy()
    return loss


def in_stages(rank: int, folder: Path, load: str, save: str) -> float:
    """The same with the model's layers on two ranks; the whole of it is put in a file, too."""
    row = PipelineModule(
        ["0", "1", "2", "3", "4"], 2, model=ordinary(), loss_fn=lambda output, _: output.square().mean(),
        partition_method=[0, 2, 5],
    )  # fmt: skip
    engine = initialize(row, ORDINARY)
    engine.load_checkpoint(folder, load)
    engine.train_batch(iter([(INPUTS, INPUTS)]))
    engine.save_checkpoint(folder, save)
    engine.save_16bit_model(folder)
    loss = float(engine.eval_batch(iter([(INPUTS, INPUTS)])))
    engine.destroy()
    return loss


def test_a_model_and_a_pipeline_of_its_modules_read_each_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, in_one, tmp_path, None, "1")
    alone = ranks.run(1, in_one, tmp_path, "1", "2")[0]
    assert ranks.run(2, in_stages, tmp_path, "1", "2 in stages") == pytest.approx([alone, alone], rel=1e-5)
    model = ordinary()
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state.keys() == model.state_dict().keys()  # tied weights under both names
    model.load_state_dict(state)
    assert float(model(INPUTS).detach().square().mean()) == pytest.approx(alone, rel=1e-5)
    assert ranks.run(1, in_one, tmp_path, "2 in stages", "3") == pytest.approx(
        ranks.run(1, in_one, tmp_path, "2", "3"), rel=1e-4
    )


def muon_job(rank: int, stages: int, folder: str, save: bool) -> list[float]:
    numbers = torch.randn(4, 2, 2, 4, generator=torch.Generator().manual_seed(1))
    samples = [(inputs, labels) for inputs, labels in numbers]
    torch.manual_seed(0)
    row = [nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), torch.tanh]
    bounds = [0, 1, 4] if stages == 2 else [0, 4]
    module = PipelineModule(row, stages, loss_fn=nn.functional.mse_loss, partition_method=bounds)
    optimizer = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.001}}
    engine = initialize(module, configuration(optimizer=optimizer))
    if save:
        engine.train_batch(iter(samples))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    losses = [engine.train_batch(iter(samples)).item(), *engine.get_lr()]
    engine.destroy()
    return losses


def test_checkpoints_of_muon_load_on_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    """The first stage has no matrix, and a group for them all the same."""
    first, last = ranks.run(2, muon_job, 2, str(tmp_path), True)
    (whole,) = ranks.run(1, muon_job, 1, str(tmp_path), False)
    assert first == last == [pytest.approx(whole[0], abs=1e-6), 0.02, 0.001]
    assert whole[1:] == [0.02, 0.001]


# --- the model alone


def model_saved(rank: int, folder: Path, layout: Layout, frozen: bool) -> dict[str, Tensor]:
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if layout.stage == 3 else {}
    engine = start(layout._replace(zero=zero), **BF16)
    train(engine, range(1))
    assert engine.save_16bit_model(folder, exclude_frozen_parameters=not frozen)
    engine.save_checkpoint(folder, "one")
    engine.destroy()
    return {name: param.detach() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("layout", [Layout(2, 1, 2, stage=1), Layout(1, 2, 2, stage=3)])
def test_save_16bit_model_writes_the_whole_model_of_all_ranks(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    whole = PipelineModule(layers(), loss_fn=loss_of)
    whole.arrange(1, 0)
    ranks.run(4, model_saved, tmp_path, layout, True)
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    whole.bfloat16().load_state_dict(state)
    saved = wholes(tmp_path / "one")
    for name, param in whole.named_parameters():
        assert torch.equal(param.detach().view(-1), saved[f"weight/{name}"].bfloat16()), name
    assert state["1.calls"] == MICROBATCHES // layout.dp
    ranks.run(4, model_saved, tmp_path, layout, False)
    less = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state.keys() - less.keys() == {"6.frozen"}


# --- what does not fit


def longer(rank: int, folder: Path, layout: Layout, saves: bool) -> list[str]:
    """What is said of a model with another layer on its last stage, and with a wider one there."""
    if saves:
        start(layout).save_checkpoint(folder, "one", exclude_frozen_parameters=True)
        return []
    told = []
    for last in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH + 1)):
        row = layers()
        if isinstance(last, nn.Linear):
            row.insert(-1, last)
        else:
            row[-2] = last
        model = PipelineModule(row, layout.pp, loss_fn=loss_of, partition_method="uniform")
        engine = initialize(model, layout.config())
        before = weights(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, "one")
        told.append(str(caught.value))
        assert all(torch.equal(before[name], after) for name, after in weights(engine).items())
        if isinstance(last, nn.Linear):
            with pytest.warns(UserWarning, match="2 parameters that the checkpoint has not, the first: 8.bias"):
                engine.load_checkpoint(folder, "one", load_module_strict=False, load_optimizer_states=False)
    return told


def test_what_differs_on_one_stage_is_reported_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    layout = Layout(2, 2, 1, stage=1)
    ranks.run(4, longer, tmp_path, layout, True)
    first, *others = ranks.run(4, longer, tmp_path, layout, False)
    assert others == [first] * 3
    names, shape = first
    assert "there are 2 parameters that the checkpoint has not, the first: 8.bias" in names
    assert f"7.weight has shape ({WIDTH},) in the checkpoint, and ({WIDTH + 1},) in the model" in shape


def other_groups(rank: int, folder: Path, saves: bool) -> str:
    """The last stage has a parameter in another group than the checkpoint."""
    layout = Layout(2, 1, 1)
    row = PipelineModule(layers(), 2, loss_fn=loss_of, partition_method="uniform")
    named = row.named_parameters()
    trained = {name: param for name, param in named if param.requires_grad}
    first = [name for name in trained if name.endswith("bias") and not (saves and name == "7.bias")]
    groups = [[trained[name] for name in trained if (name in first) == small] for small in (True, False)]
    optimizer = torch.optim.SGD([{"params": group, "lr": 0.1 * (rank + 1)} for group in groups], momentum=0.9)
    config = {key: setting for key, setting in layout.config().items() if key != "optimizer"}
    engine = initialize(row, config, optimizer)
    if saves:
        engine.save_checkpoint(folder, "one")
        optimizer.param_groups[0]["lr"] = 5.0
        engine.load_checkpoint(folder, "one")
        return str([group["lr"] for group in optimizer.param_groups])
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, "one")
    return str(caught.value)


def test_parameter_groups_are_those_of_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, other_groups, tmp_path, True) == ["[0.1, 0.1]", "[0.2, 0.2]"]
    told = ranks.run(2, other_groups, tmp_path, False)
    assert told[0] == told[1]
    assert "parameter group 0 differs: 7.bias is in that of the optimizer only" in told[0]


class Factored(torch.optim.SGD):
    """Keeps a number for each row of a matrix."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim == 2:
                    self.state[param]["rows"] = param.detach().mean(1)


def factored(rank: int, folder: Path, layout: Layout, saves: bool) -> str | None:
    row = PipelineModule(layers(), layout.pp, loss_fn=loss_of, partition_method="uniform", seed_layers=True)
    optimizer = Factored([param for param in row.parameters() if param.requires_grad], lr=0.1, momentum=0.9)
    config = {key: setting for key, setting in layout.config().items() if key != "optimizer"}
    engine = initialize(row, config, optimizer)
    if saves:
        train(engine, range(1))
        engine.save_checkpoint(folder, "one")
        return None
    try:
        engine.load_checkpoint(folder, "one")
    except CheckpointError as error:
        return str(error)
    engine.save_checkpoint(folder, "two")
    return None


def test_a_state_that_cannot_be_resharded_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    cut = Layout(1, 1, 2)
    ranks.run(2, factored, tmp_path, cut, True)
    assert ranks.run(2, factored, tmp_path, cut, False) == [None, None]
    assert differences(tmp_path / "one", tmp_path / "two", tensors) == []
    told = ranks.run(2, factored, tmp_path, Layout(2, 1, 1), False)
    assert told[0] == told[1]
    assert told[0] is not None
    assert "state 'rows' of 1.places.weight has shape (5,), which cannot be sharded as parameters are" in told[0]


def limited(rank: int, folder: Path) -> str:
    """It is the rank of the last stage that cannot write."""
    return save_on_small_disk(start(Layout(2, 1, 1)), rank == 1, folder)


def test_a_stage_that_cannot_write_fails_all_and_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, limited, tmp_path)
    assert first == second
    assert first.startswith(f"checkpoint bad was not saved to {tmp_path}: rank 1: {os.strerror(errno.EFBIG)}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]


# --- what is written


def test_what_several_ranks_have_is_written_once(ranks: Ranks, tmp_path: Path) -> None:
    layout = Layout(2, 1, 2)
    ranks.run(4, trained_in, tmp_path, layout, {}, "one", None)
    contents = Contents(tmp_path / "one")
    for name, about in contents._metadata.state_dict_metadata.items():
        if hasattr(about, "size"):
            assert sum(chunk.sizes.numel() for chunk in about.chunks) == about.size[0], name
    training = value(tmp_path / "one", "training")
    assert (training["format"], training["mesh"]) == (2, (2, 1, 2))
    assert training["weights"]["2.up.weight"] == (2 * WIDTH, WIDTH)
    assert {name for name in training["cuts"] if not name.startswith("3.attention")} == {
        "tied_modules.embedding.weight",
        *(f"{layer}.{part}" for layer in range(2, 6) for part in ("up.weight", "up.bias", "down.weight")),
    }
    assert "weight/2.up.weight@1/2" in contents
    assert "weight/2.up.weight" not in contents


# --- shards


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorShard | None:
    """Some sharding of a parameter, as the first rank has it."""
    size, dim = draw(st.integers(1, 4)), draw(st.integers(0, len(shape) - 1))
    if size == 1:
        return None
    length = shape[dim]
    fitting = [copies for copies in (1, 2) if size % copies == 0 and length % (size // copies) == 0]
    if not fitting:
        padding = -length % size
        return TensorShard(shape=shape, dim=dim, bands=(length + padding,), size=size, rank=0, padding=padding)
    copies = draw(st.sampled_from(fitting))
    pieces = size // copies
    first = pieces * draw(st.integers(0, length // pieces))
    bands = tuple(band for band in (first, length - first) if band)
    return TensorShard(shape=shape, dim=dim, bands=bands, size=size, rank=0, copies=copies)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sharding_is_read_as_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(8,), (3,), (4, 6), (5, 3), (12, 2), (2, 8, 3)]))
    saved, mine = data.draw(cuts(shape)), data.draw(cuts(shape))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1

    def parts(cut: TensorShard | None) -> list[tuple[TensorShard | None, Tensor]]:
        ranks = [None] if cut is None else [cut.of_rank(rank) for rank in range(cut.size)]
        return [(each, (whole if each is None else each.take(whole)).reshape(-1)) for each in ranks]

    path = tmp_path_factory.mktemp("cut") / "one"
    path.mkdir()
    written = {part_name("p", cut): flat for cut, flat in parts(saved)}
    write(path, [Piece(name, flat, flat.numel()) for name, flat in written.items()], {}, World(), "test")
    for cut, expected in parts(mine):
        start = data.draw(st.integers(0, expected.numel()))
        stop = data.draw(st.integers(start, expected.numel()))
        flat = torch.full((stop - start,), -1.0, dtype=torch.float64)
        read(Contents(path), [Wanted(Piece("p", flat, expected.numel(), start), cut, saved)])
        assert torch.equal(flat, expected[start:stop])
