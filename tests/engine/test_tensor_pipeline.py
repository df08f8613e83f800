"""Tensor parallelism across the stages of a pipeline: activations that stay sharded along the sequence from one stage
to the next, and weights tied across stages that are sharded over the ranks of each."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pipeline_models import (
    MICROBATCHES,
    VOCABULARY,
    WIDTH,
    Block,
    batches,
    configuration,
    loss_of,
    module,
    project,
    start,
    weights,
)  # fmt: skip
from ranks import RankFailed, Ranks
from spans import recorded
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec
from dsprof.engine.tensor import PlanError, VocabularyCrossEntropy, plan_for


class Case(NamedTuple):
    stages: int
    replicas: int
    parts: int
    schedule: str = "1f1b"
    zero: int = 0
    recompute: int = 0
    virtual: int = 1
    bounds: tuple[int, ...] = ()


def even(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(inputs, labels) of each micro-batch, of four tokens and of two in turn."""
    return [(x[:, : 4 - 2 * (at % 2)], x[:, 1 : 5 - 2 * (at % 2)]) for at, x in enumerate(ids)]


@functools.cache
def reference(replicas: int) -> dict[str, Tensor]:
    """The weights after training in one process."""
    whole = module()
    whole.arrange(1, 0)
    whole.double()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for step in batches(replicas):
        optimizer.zero_grad()
        for replica in range(replicas):
            for inputs, labels in even(step[:, replica]):
                (loss_of(whole(inputs), labels) / (replicas * MICROBATCHES)).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach().clone() for name, param in whole.named_parameters()}


def cut_config(case: Case, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.zero}
    if case.zero == 3:
        zero["stage3_param_persistence_threshold"] = 20
    return configuration(
        zero_optimization=zero, pipeline={"schedule": case.schedule},
        tensor_parallel={"autotp_size": case.parts, "sequence_parallel": True, **more},
    )  # fmt: skip


def train(rank: int, case: Case) -> tuple[dict[str, Tensor], set[tuple[str, int]]]:
    """The weights, and what this rank sent to another stage in the last step: name and bytes."""
    divided = {"partition_method": case.bounds} if case.bounds else {}
    model = module(
        case.stages, virtual_stages=case.virtual, activation_checkpoint_interval=case.recompute, **divided
    ).double()  # fmt: skip
    engine = start(model, cut_config(case))
    for step in batches(case.replicas):
        with recorded() as spans:
            engine.train_batch(iter(even(step[:, engine.parallel.mesh.dp_rank])))
    found = weights(engine)
    engine.destroy()
    return found, {(span.name, span.bytes) for span in spans if span.kind == "comm" and span.name == "send"}


CASES = [
    Case(2, 1, 2, "zero-bubble", 3),
    Case(2, 1, 2, "interleaved", 2, 1, virtual=2),
    Case(1, 2, 2, zero=2, recompute=2),
    Case(3, 1, 2, "1f1b", 1, 2, bounds=(0, 1, 8, 11)),  # blocks, and nothing but blocks, on the second stage
]


MORE = [
    Case(1, 1, 2, zero=1),
    Case(2, 2, 2, "gpipe", 1),
    Case(2, 2, 2, "zero-bubble", 2, 2),
    Case(4, 1, 2, "1f1b", 3, 3),
    *(Case(2, 1, 2, schedule, zero, recompute, virtual=1 + (schedule == "interleaved"))
      for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble") for zero in range(4) for recompute in (0, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: "-".join(map(str, case)),
)  # fmt: skip
def test_sequences_sharded_across_stages_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    expected = reference(case.replicas)
    seen: set[str] = set()
    for found, sent in ranks.run(case.stages * case.replicas * case.parts, train, case):
        for name, value in found.items():
            assert (value - expected[name]).abs().max().item() < 1e-9, name
        seen |= found.keys()
        # Two samples of four tokens or two, half of them on each rank.
        halves = {2 * length // 2 * WIDTH * 8 for length in (2, 4)}
        assert {size for _, size in sent} == (halves if case.stages > 1 else set())
    assert seen == expected.keys()


class Noise(nn.Module):
    """Dropout that tells what it drew."""

    drawn: list[Tensor]
    fails: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("out of noise")
        if not self.training:
            return x
        drawn = torch.rand_like(x)
        self.drawn.append(drawn)
        return x * (0.5 + drawn)


def noisy(recompute: int) -> PipelineModule:
    torch.manual_seed(3)
    row = [nn.Embedding(VOCABULARY, WIDTH), Noise(), *(part for _ in range(4) for part in (Block(WIDTH), Noise())),
           nn.Linear(WIDTH, VOCABULARY, bias=False)]  # fmt: skip
    for layer in row:
        if isinstance(layer, Noise):
            layer.drawn = []
    return PipelineModule(
        row, 2, loss_fn=loss_of, partition_method=[0, 5, len(row)], activation_checkpoint_interval=recompute
    )


def draw(rank: int, schedule: str, recompute: int) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """What each layer drew in the forwards of a step, and the weights after it."""
    model = noisy(recompute).double()
    engine = start(model, cut_config(Case(2, 1, 2, schedule)))
    noises = {name: layer for name, layer in model.named_modules() if isinstance(layer, Noise)}
    for noise in noises.values():
        noise.drawn.clear()
    engine.train_batch(iter(even(batches(1)[0][:, 0])))
    found = weights(engine)
    engine.destroy()
    return {name: noise.drawn for name, noise in noises.items()}, found


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
def test_random_numbers_are_a_ranks_own_between_the_blocks_and_repeated(ranks: Ranks, schedule: str) -> None:
    plain = ranks.run(4, draw, schedule, 0)
    for drawn, _ in plain:
        kept = [x.flatten()[:8] for passes in drawn.values() for x in passes]
        assert all(not torch.equal(one, other) for at, one in enumerate(kept) for other in kept[:at])
    for one, other in ((plain[0][0], plain[1][0]), (plain[2][0], plain[3][0])):
        alike = {name: [torch.equal(x, y) for x, y in zip(one[name], other[name], strict=True)] for name in one}
        # Layer 1 is before the first block, layer 9 after the last.
        assert alike == {name: [name in ("1", "9")] * MICROBATCHES for name in one}
    for (_, expected), (_, found) in zip(plain, ranks.run(4, draw, schedule, 2), strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def fail_once(rank: int) -> dict[str, list[Tensor]]:
    """What each layer drew in a step after one that failed between the blocks of the second stage."""
    model = noisy(0)
    engine = start(model.double(), cut_config(Case(2, 1, 2)))
    noises = {name: layer for name, layer in model.named_modules() if isinstance(layer, Noise)}
    for name, noise in noises.items():
        noise.fails = name == "7"
    with pytest.raises((ValueError, PipelineError), match="out of noise"):
        engine.train_batch(iter(even(batches(1)[0][:, 0])))
    for noise in noises.values():
        noise.drawn.clear()
        noise.fails = False
    engine.train_batch(iter(even(batches(1)[0][:, 0])))
    engine.destroy()
    return {name: noise.drawn for name, noise in noises.items()}


def test_random_numbers_agree_again_after_a_step_that_failed(ranks: Ranks) -> None:
    _, _, one, other = ranks.run(4, fail_once)
    alike = {name: [torch.equal(x, y) for x, y in zip(one[name], other[name], strict=True)] for name in one}
    assert alike == {name: [name == "9"] * MICROBATCHES for name in one}


def refused(rank: int, row: Callable[[], list[Any]]) -> None:
    model = PipelineModule(row(), 2, loss_fn=loss_of, partition_method="uniform")
    start(model, cut_config(Case(2, 1, 2)))


def no_blocks() -> list[Any]:
    return [nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]


def shared_norm() -> list[Any]:
    shared = nn.LayerNorm(WIDTH)
    return [nn.Embedding(VOCABULARY, WIDTH), shared, Block(WIDTH), shared, Block(WIDTH), nn.Linear(WIDTH, VOCABULARY)]


@pytest.mark.parametrize(
    ("row", "says"),
    [(no_blocks, "sequence_parallel: the pipeline has no layers that are sharded and keep the shape of activations"),
     (shared_norm, r"sequence_parallel: 1.weight is used by layers 3, where the sequence is sharded, and 1, where it")],
)  # fmt: skip
def test_what_cannot_be_sharded_along_the_sequence_is_refused_on_every_rank(ranks: Ranks, row: Any, says: str) -> None:
    with pytest.raises(RankFailed, match=says) as error:
        ranks.run(4, refused, row)
    assert str(error.value).count("PlanError: sequence_parallel") == 4


# --- stages that hand on more than one tensor


class Turns(nn.Module):
    """Looks tokens up, and makes what the blocks need beside: tables of rotary positions, and a mask."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("pace", 0.5 ** torch.arange(2.0))

    def forward(self, batch: Any) -> Any:
        ids: Tensor = batch["ids"] if self.named else batch
        angles = (torch.arange(ids.shape[1])[:, None] * self.pace).repeat(1, 2)
        return self.table(ids), (angles.cos(), angles.sin()), {"keep": ids > 0}


class Turned(nn.Module):
    """A block whose layers are registered in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, row: Any) -> Any:
        x, (cos, sin), mask = row
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        q, k = (part * cos + part.roll(2, -1) * sin for part in (q, k))
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask["keep"][:, None, None], -100.0)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x))), (cos, sin), mask


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, row: Any) -> Tensor:
        logits: Tensor = self.logits(row[0])
        return logits


def turning(named: bool, stages: int | None, virtual: int = 1) -> PipelineModule:
    torch.manual_seed(6)
    row = [Turns(named), *(Turned() for _ in range(4)), Head()]
    return PipelineModule(
        row, stages, loss_fn=loss_of, partition_method="uniform", virtual_stages=virtual
    ).double()  # fmt: skip


def hand_on(rank: int, named: bool, virtual: int, sequence: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights after a step, those of one process, and what was printed."""
    data = [({"ids": x} if named else x, y) for x, y in even(batches(1)[0][:, 0])]
    whole = turning(named, 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for inputs, labels in data:
        (loss_of(whole(inputs), labels) / MICROBATCHES).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    config = cut_config(Case(2, 1, 2, "interleaved" if virtual > 1 else "1f1b"), sequence_parallel=sequence)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        engine, *_ = ds.initialize(
            model=turning(named, 2, virtual), config=config, example=data[0][0] if named else None
        )  # fmt: skip
    engine.train_batch(iter(data))
    found = weights(engine)
    engine.destroy()
    return found, {name: param.detach() for name, param in whole.named_parameters()}, printed.getvalue()


@pytest.mark.parametrize(
    ("named", "virtual", "sequence"),
    [(False, 1, False), pytest.param(True, 2, False, marks=pytest.mark.slow), (True, 1, True)],
    ids=["guessed", "example-virtual", "sequence"],
)  # fmt: skip
def test_a_stage_is_planned_on_what_the_one_before_returns(
    ranks: Ranks, named: bool, virtual: int, sequence: bool
) -> None:
    seen: set[str] = set()
    printed = []
    for found, expected, text in ranks.run(4, hand_on, named, virtual, sequence):
        assert all((value - expected[name]).abs().max().item() < 1e-9 for name, value in found.items())
        seen |= found.keys()
        printed.append(text)
    assert seen == expected.keys()
    assert printed[1:] == ["", "", ""]
    first, second = printed[0].removeprefix("pipeline rank 0:\n").split("pipeline rank 1:\n")
    for number in range(1, 5):
        here, there = (first, second) if (number < 3 if virtual == 1 else number in (1, 4)) else (second, first)
        for layer, style in (("qkv", "column"), ("out", "row"), ("up", "column"), ("down", "row")):
            assert any(line.split()[:2] == [f"{number}.{layer}", style] for line in here.splitlines())
            assert f"{number}.{layer} " not in there


def test_an_example_that_a_stage_does_not_take_is_refused_with_its_number() -> None:
    model = turning(True, 1, virtual=2)
    says = "tensor parallelism: stage 0 of the pipeline does not take the example: KeyError: 'ids'"
    with pytest.raises(PlanError, match=says):
        plan_for(model, 2, example={"x": 1})
    plan_for(model, 2, example=({"ids": torch.ones(2, 4, dtype=torch.int64)},))  # a tuple of one argument
    model.get_submodule("3").register_forward_pre_hook(lambda module, args: (args[0][0],))
    with pytest.raises(PlanError, match="stage 1 of the pipeline does not take what stage 0 returns: ValueError: "):
        plan_for(model, 2, example={"ids": torch.ones(2, 4, dtype=torch.int64)})


# --- weights tied across stages


class Tree(nn.Module):
    """An ordinary model whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, attention=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def specs(forward_fn: Callable[[nn.Module, Tensor], Tensor] = project) -> list[Any]:
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Block, WIDTH, attention=True) for _ in range(3)),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=forward_fn),
    ]


def normalized(embedding: nn.Module, x: Tensor) -> Tensor:
    """No rank could compute its features of this without those of the others."""
    return project(embedding, x).log_softmax(-1)


class Tied(NamedTuple):
    kind: str
    stages: int
    parts: int
    zero: int
    schedule: str = "1f1b"
    sequence: bool = False
    parallel_loss: bool = False


def tied_module(kind: str, stages: int | None, loss_fn: Any) -> PipelineModule:
    torch.manual_seed(5)
    if kind == "names":
        return PipelineModule(["embed", "blocks", "head"], stages, loss_fn=loss_fn, model=Tree().double())
    row = specs(normalized if kind == "normalized" else project)
    return PipelineModule(row, stages, loss_fn=loss_fn, seed_layers=True).double()


@functools.cache
def tied_reference(kind: str) -> tuple[dict[str, Tensor], float]:
    """The weights after a step in one process, and the norm of its gradients."""
    whole = tied_module(kind, None, loss_of)
    whole.arrange(1, 0)
    whole.double()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for inputs, labels in even(batches(1)[0][:, 0]):
        (loss_of(whole(inputs), labels) / MICROBATCHES).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
    optimizer.step()
    return {name: param.detach().clone() for param, name in whole.names().items()}, norm


def train_tied(rank: int, case: Tied) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], float, str, int]:
    """Weights, the shapes of this rank's parts, the norm, what was printed, and the most logits that came together."""
    model = tied_module(case.kind, case.stages, VocabularyCrossEntropy() if case.parallel_loss else loss_of).double()
    config = cut_config(Case(case.stages, 1, case.parts, case.schedule, case.zero), sequence_parallel=case.sequence)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        engine = start(model, config)
    shapes = {param.name: tuple(param.shape) for param in engine.zero.params}
    with recorded() as spans:
        engine.train_batch(iter(even(batches(1)[0][:, 0])))
    gathered = [span.bytes for span in spans if span.purpose == "tensor-parallel" and span.name == "all_gather"
                and span.module in ("head", "tied_modules.embedding")]  # fmt: skip
    found, norm = weights(engine), engine.get_global_grad_norm()
    engine.destroy()
    return found, shapes, norm, printed.getvalue(), max(gathered, default=0)


@pytest.mark.parametrize(
    "case",
    [
        Tied("specs", 1, 2, 0),
        Tied("specs", 2, 2, 3, "zero-bubble", sequence=True),
        Tied("specs", 2, 2, 1, parallel_loss=True),
        pytest.param(Tied("specs", 2, 4, 2), marks=pytest.mark.slow),
        pytest.param(Tied("names", 2, 2, 0), marks=pytest.mark.slow),
        Tied("names", 2, 2, 3, parallel_loss=True, sequence=True),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_vocabulary_tied_across_stages_is_sharded_on_each(ranks: Ranks, case: Tied) -> None:
    expected, expected_norm = tied_reference(case.kind)
    name = "embed.weight" if case.kind == "names" else "tied_modules.embedding.weight"
    seen: set[str] = set()
    several = ranks.run(case.stages * case.parts, train_tied, case)
    for rank, (found, shapes, norm, printed, gathered) in enumerate(several):
        tolerance = 1e-6 if case.parallel_loss else 1e-9  # the other loss is taken in fp32
        assert norm == pytest.approx(expected_norm, rel=tolerance)
        for key, value in found.items():
            assert (value - expected[key]).abs().max().item() < tolerance, key
        seen |= found.keys()
        assert shapes[name] == (-(-VOCABULARY // case.parts), WIDTH)
        last = rank >= (case.stages - 1) * case.parts
        assert bool(gathered) == (last and not case.parallel_loss)
        assert (f"{name}, tied over the pipeline: sharded by rows wherever it is used" in printed) == (rank == 0)
    assert seen == expected.keys()


def test_a_tied_weight_stays_whole_where_stages_cannot_shard_it_alike(ranks: Ranks) -> None:
    expected, _ = tied_reference("normalized")
    for rank, (found, shapes, _, printed, _) in enumerate(ranks.run(4, train_tied, Tied("normalized", 2, 2, 1))):
        assert shapes["tied_modules.embedding.weight"] == (VOCABULARY, WIDTH)
        assert all((value - expected[key]).abs().max().item() < 1e-9 for key, value in found.items())
        says = (
            "  tied_modules.embedding.weight, tied over the pipeline: whole, since layer 4 is a function of "
            "tied_modules.embedding that does not compute a feature of each row"
        )
        assert (says in printed) == (rank == 0)


def resume(rank: int, folder: str, case: Tied, load: bool) -> dict[str, Tensor]:
    """Train two steps, from a checkpoint of another layout or to one."""
    model = tied_module(case.kind, case.stages, loss_of)
    engine = start(
        model, cut_config(Case(case.stages, 1, case.parts, case.schedule, case.zero), sequence_parallel=False)
    )
    if load:
        engine.load_checkpoint(folder)
    engine.train_batch(iter(even(batches(1)[int(load)][:, 0])))
    if not load:
        engine.save_checkpoint(folder)
        engine.train_batch(iter(even(batches(1)[1][:, 0])))
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "count"), [("specs", 2), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("specs", "names"))]
)
def test_checkpoints_of_tied_shards_are_read_by_other_layouts(
    ranks: Ranks, kind: str, count: int, tmp_path: Any
) -> None:
    layouts = [Tied(kind, 2, 2, 2), Tied(kind, 1, 2, 3), Tied(kind, 1, 1, 1), Tied(kind, 1, 4, 0)][:count]
    for number, (saved, loaded) in enumerate(zip(layouts, layouts[1:] + layouts[:1], strict=True)):
        folder = str(tmp_path / str(number))
        expected = {k: v for found in ranks.run(saved.stages * saved.parts, resume, folder, saved, False)
                    for k, v in found.items()}  # fmt: skip
        for found in ranks.run(loaded.stages * loaded.parts, resume, folder, loaded, True):
            assert all((value - expected[name]).abs().max().item() < 1e-9 for name, value in found.items())
