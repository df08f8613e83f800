"""Pipelines: what stages hold and send, what they tell, and how they fail."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from pipeline_models import (
    MICROBATCHES,
    VOCABULARY,
    WIDTH,
    Block,
    batches,
    configuration,
    examples,
    layers,
    loss_of,
    module,
    start,
    trained,
    weights,
)
from ranks import RankFailed, Ranks
from spans import recorded
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.config import ConfigError
from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec
from dsprof.engine.schedule import SCHEDULES, Plan, make_plan

PIPELINE = "PipelineModule: "


# --- which layers are where


def test_layers_have_the_names_of_the_whole_model_on_whichever_stage() -> None:
    whole = module()
    whole.arrange(1, 0)
    names: list[str] = []
    for rank in range(3):
        part = module()
        part.arrange(3, rank)
        names += [name for name, _ in part.named_parameters()]
    counts = Counter(names)
    assert set(counts) == {name for name, _ in whole.named_parameters()}
    assert {name for name, count in counts.items() if count > 1} == {"tied_modules.embedding.weight"}


def test_weights_do_not_depend_on_the_stages() -> None:
    whole = module()
    whole.arrange(1, 0)
    expected = dict(whole.named_parameters())
    for rank, virtual in itertools.product(range(2), (1, 2)):
        part = module()
        part.placement.virtual_stages = virtual
        part.arrange(2, rank)
        assert all(torch.equal(param, expected[name]) for name, param in part.named_parameters())


def test_a_rank_builds_its_own_layers_only() -> None:
    built: list[int] = []

    def layer(number: int) -> nn.Module:
        built.append(number)
        return nn.Identity()

    part = PipelineModule([LayerSpec(layer, number) for number in range(6)], partition_method="uniform")
    assert built == []
    part.arrange(3, 1)
    assert built == [2, 3]


class Tree(nn.Module):
    """An ordinary model: a list of blocks, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        assert isinstance(self.trunk.blocks, nn.ModuleList)
        for block in self.trunk.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def tree() -> Tree:
    torch.manual_seed(5)
    return Tree()


def tree_job(rank: int) -> dict[str, Tensor]:
    model = PipelineModule(["embed", "trunk.blocks", "head"], 2, loss_fn=loss_of, model=tree())
    engine = start(model, configuration())
    found = trained(engine)
    assert {param.name for param in engine.zero.params} == found.keys()
    engine.destroy()
    return found


def test_an_ordinary_model_is_divided_by_the_names_of_its_modules(ranks: Ranks) -> None:
    first, last = ranks.run(2, tree_job)
    assert torch.equal(first["embed.weight"], last["embed.weight"])  # tied across the stages
    whole = tree()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for step in batches(1):
        optimizer.zero_grad()
        for inputs, labels in examples(step[:, 0]):
            (loss_of(whole(inputs), labels) / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    found = first | last
    expected = dict(whole.named_parameters())
    assert found.keys() == expected.keys()
    for name, param in expected.items():
        assert (found[name] - param).abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PipelineModule([], 1), PIPELINE + "no layers"),
        (lambda: PipelineModule([3], 1), PIPELINE + "layer 0 is a int; a layer is a LayerSpec, a module or a function"),
        (
            lambda: PipelineModule(["embd"], 1, model=tree()),
            PIPELINE + "the model has no module 'embd'; did you mean 'embed'?",
        ),
        (
            lambda: PipelineModule(["embed"], 1, model=tree()),
            PIPELINE + "no layer has the parameter trunk.blocks.0.norm.weight",
        ),
        (lambda: LayerSpec(nn.Linear(2, 2)), "LayerSpec takes a class and its arguments, and got a Linear"),
        (lambda: module().arrange(20, 0), "20 stages"),
        (
            lambda: TiedLayerSpec("k", nn.Linear, 2, 2, tied_weight_attr="weight").build(),
            r"TiedLayerSpec\('k', Linear\): tied_weight_attr leaves out bias",
        ),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def two_stages_job(rank: int) -> None:
    PipelineModule(layers(), 2)


def test_stages_that_do_not_divide_the_ranks_are_refused_on_all(ranks: Ranks) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks.run(3, two_stages_job)
    assert str(failed.value).count("2 stages do not divide the 3 ranks of the job; write one of 1, 3") == 3


# --- training


def loss_job(rank: int) -> tuple[list[float], list[float], float]:
    engine = start(module(2), configuration())
    step = batches(2, steps=3)
    data = [iter(examples(ids[:, engine.parallel.mesh.dp_rank])) for ids in step]
    evaluated = [engine.eval_batch(data[2]).item()]
    losses = [engine.train_batch(each).item() for each in data[:2]]
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return losses, evaluated, norm


def test_the_loss_is_the_mean_of_all_and_the_same_on_every_rank(ranks: Ranks) -> None:
    found = ranks.run(4, loss_job)
    assert found[1:] == found[:1] * 3
    losses, evaluated, _ = found[0]
    whole = module()
    whole.arrange(1, 0)

    def mean(ids: Tensor) -> float:
        values = [loss_of(whole(x), y) for replica in range(2) for x, y in examples(ids[:, replica])]
        return torch.stack(values).mean().item()

    ids = batches(2, steps=3)
    assert evaluated == [pytest.approx(mean(ids[2]), abs=1e-6)]
    assert losses[0] == pytest.approx(mean(ids[0]), abs=1e-6)
    assert losses[1] < losses[0]


class Pair(nn.Module):
    """Passes on two tensors that get gradients, one that is looked at but gets none, and a mask of bools."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b, ids, mask = inputs
        return self.one(a) * mask, b + a, ids, mask


def first_of(inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0] + inputs[2].unsqueeze(-1)


def pairs_data() -> list[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
    ids, mask = torch.tensor([1, 2]), torch.tensor([[True, False, True, True]])
    return [((a * k, b, ids, mask), torch.zeros(2, 4)) for k in range(MICROBATCHES)]


def pairs_job(rank: int, schedule: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = PipelineModule(
        [Pair(), Pair(), Pair(), first_of], 2, loss_fn=nn.functional.mse_loss, partition_method=[0, 2, 4]
    )
    engine = start(model, configuration(pipeline={"schedule": schedule}))
    engine.train_batch(iter(pairs_data()))
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_tuples_of_any_tensors_are_passed_on(ranks: Ranks, schedule: str) -> None:
    """The loss does not depend on `b` in the end, so what goes back for it is zero."""
    first, last = ranks.run(2, pairs_job, schedule)
    torch.manual_seed(3)
    whole = nn.Sequential(Pair(), Pair(), Pair())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for inputs, labels in pairs_data():
        (nn.functional.mse_loss(first_of(whole(inputs)), labels) / MICROBATCHES).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    found = first | last
    for name, param in whole.named_parameters():
        assert (found[name] - param).abs().max().item() < 1e-6


def outputs_job(rank: int) -> Any:
    engine = start(module(2), configuration())
    data = examples(batches(1)[0][:, 0])
    loss, outputs = engine.eval_batch(iter(data), return_logits=True)
    only = engine.eval_batch(iter(data), compute_loss=False)
    few = engine.eval_batch(iter(data), num_micro_batches=1).item()
    engine.destroy()
    return loss.item(), outputs, only, few


def test_eval_batch_gives_losses_and_outputs(ranks: Ranks) -> None:
    (loss, nothing, none, few), (same, outputs, only, _) = ranks.run(2, outputs_job)
    whole = module()
    whole.arrange(1, 0)
    data = examples(batches(1)[0][:, 0])
    expected = [loss_of(whole(x), y).item() for x, y in data]
    assert loss == same == pytest.approx(sum(expected) / len(expected), abs=1e-6)
    assert few == pytest.approx(expected[0], abs=1e-6)
    assert (nothing, none) == (None, None)
    for (x, _), output, again in zip(data, outputs, only, strict=True):
        assert torch.allclose(output, whole(x), atol=1e-6)
        assert torch.equal(output, again)


def frozen_job(rank: int) -> dict[str, Tensor]:
    model = module(2)
    for name, param in model.named_parameters():
        param.requires_grad_(rank == 1 and "embedding" not in name)  # nothing of the first stage is trained
    engine = start(model, configuration())
    found = trained(engine)
    engine.destroy()
    return found


def test_a_stage_without_anything_to_train_passes_on(ranks: Ranks) -> None:
    first, last = ranks.run(2, frozen_job)
    part = module()
    part.arrange(2, 0)
    assert all(torch.equal(first[name], param) for name, param in part.named_parameters())
    changed = module()
    changed.arrange(2, 1)
    assert any(not torch.equal(last[name], param) for name, param in changed.named_parameters())


def asked_job(rank: int) -> tuple[Any, ...]:
    engine = start(module(2), configuration())
    grid = engine.grid
    found = (
        engine.stage_id, engine.num_stages, engine.micro_batches, engine.micro_batch_size, engine.is_first_stage(),
        engine.is_last_stage(), grid.get_data_parallel_id(), grid.get_data_parallel_world_size(),
        grid.get_model_parallel_world_size(), grid.get_global_rank(), engine.mpu.get_pipe_parallel_world_size(),
    )  # fmt: skip
    engine.destroy()
    return found


def test_every_rank_knows_its_stage_and_its_place_in_the_grid(ranks: Ranks) -> None:
    assert ranks.run(4, asked_job) == [
        (rank // 2, 2, 4, 2, rank < 2, rank >= 2, rank % 2, 2, 2, rank, 2) for rank in range(4)
    ]


def early_list_job(rank: int) -> None:
    model = module()
    ds.initialize(
        model=model, model_parameters=list(model.parameters()), config=configuration(pipeline={"stages": 2})
    )  # fmt: skip


def test_parameters_that_were_listed_before_there_were_any_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, early_list_job)
    assert str(failed.value).count("initialize: model_parameters is empty, and the model has parameters to train") == 2


# --- what is told


def told_job(rank: int, schedule: str, virtual: int) -> tuple[list[tuple[str, int, int]], list[tuple[Any, ...]]]:
    engine = start(module(2, virtual_stages=virtual), configuration(pipeline={"schedule": schedule}))
    data = batches(1)
    engine.train_batch(iter(examples(data[0][:, 0])))
    with recorded() as seen:
        engine.train_batch(iter(examples(data[1][:, 0])))
    engine.destroy()
    spans = sorted(seen, key=lambda span: span.start_ns)
    pipe = [(span.name, span.stage, span.microbatch) for span in spans if span.kind == "pipe"]
    moved = [
        (span.kind, span.name, span.stage, span.microbatch, span.peer, span.lane)
        for span in spans
        if span.purpose == "pipeline" and span.peer is not None
    ]
    return pipe, moved


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_spans_are_the_actions_of_the_plan(ranks: Ranks, schedule: str, virtual: int) -> None:
    plan = make_plan(schedule, 2, MICROBATCHES, virtual)
    found = ranks.run(2, told_job, schedule, virtual)
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for rank, (pipe, moved) in enumerate(found):
        assert pipe == [tuple(action) for action in plan.actions[rank]]
        assert {lane.split(".")[1] for kind, *_, lane in moved if kind == "comm"} == {"pipe"}
        assert all(peer == 1 - rank for *_, peer, _ in moved)
        sent.update((s, m) for kind, name, s, m, *_ in moved if (kind, name) == ("comm", "send"))
        received.update((s, m) for kind, name, s, m, *_ in moved if (kind, name) == ("comm", "recv"))
    stages = plan.stages
    assert sent == {(s, m): (s < stages - 1) + (s > 0) for s in range(stages) for m in range(MICROBATCHES)}
    assert received == sent


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_link_carries_is_sent_and_expected_in_one_order(schedule: str) -> None:
    """A link between two ranks carries messages for several stages."""
    for ranks, microbatches, virtual in itertools.product(range(2, 7), (1, 2, 3, 5, 8), (1, 2, 3)):
        if virtual == 1 or schedule == "interleaved":
            check_order(make_plan(schedule, ranks, microbatches, virtual))


def check_order(plan: Plan) -> None:
    for way, ahead in (("F", 1), ("B", -1)):
        for rank, actions in enumerate(plan.actions):
            sent = [
                (a.stage + ahead, a.microbatch) for a in actions if a.op == way and 0 <= a.stage + ahead < plan.stages
            ]
            receiver = plan.actions[(rank + ahead) % plan.ranks]
            expected = [(a.stage, a.microbatch) for a in receiver if a.op == way and 0 <= a.stage - ahead < plan.stages]
            assert sent == expected


# --- failing


class Breaks(nn.Module):
    """Does in the second micro-batch what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.linear(x)
        if self.calls < 2:
            return y
        if self.how == "raises":
            raise ArithmeticError("cannot go on")
        return {"set": {y}, "nested": {"h": [y, slice(2)]}, "complex": y.to(torch.complex64), "data": y}[self.how]


def failing_job(rank: int, how: str, where: int) -> str:
    model = PipelineModule(
        [Breaks(how) if at == where else nn.Linear(4, 4) for at in range(3)], 3, loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )  # fmt: skip
    engine = start(model, configuration())
    data = [(torch.ones(2, 4), torch.ones(2, 4))] * MICROBATCHES
    try:
        engine.train_batch(iter(data[: 2 if how == "data" else None]))
    except (PipelineError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "where", "says"),
    [
        ("raises", 1, "stage 1 of the pipeline failed: ArithmeticError: cannot go on"),
        ("raises", 2, "stage 2 of the pipeline failed: ArithmeticError: cannot go on"),
        (
            "set",
            0,
            "layer 0 (Breaks), the last of stage 0 of the pipeline, returned a set, which cannot be sent to the next",
        ),
        ("nested", 1, "the last of stage 1 of the pipeline, returned a dict with a slice in it, which cannot be sent"),
        ("complex", 1, "the last of stage 1 of the pipeline, returned a tensor of torch.complex64, which cannot be"),
        ("data", 0, "train_batch: the iterator ended after 2 micro-batches of the step"),
    ],
)
def test_a_stage_that_fails_fails_on_every_rank(ranks: Ranks, how: str, where: int, says: str) -> None:
    found = ranks.run(3, failing_job, how, where)
    told = sum(text.endswith(says) or says in text for text in found)
    own = sum(text.startswith("ArithmeticError") for text in found)
    assert told + own == 3, found


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (torch.ones(2, 4), "the iterator gave a Tensor; a pipeline takes (inputs, labels)"),
        ((torch.ones(2, 4),) * 3, "the iterator gave 3 things; a pipeline takes (inputs, labels)"),
    ],
)
def test_batches_that_are_no_pairs_are_refused(batch: Any, says: str) -> None:
    engine = start(PipelineModule([nn.Linear(4, 4)], 1, loss_fn=nn.functional.mse_loss), configuration())
    with pytest.raises(PipelineError) as refused:
        engine.train_batch(itertools.repeat(batch))
    assert says in str(refused.value)
    engine.destroy()


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    engine = start(PipelineModule([nn.Linear(4, 4)], 1), configuration())
    with pytest.raises(PipelineError, match="there is no loss_fn, and the last layer returned a tensor of shape"):
        engine.train_batch(itertools.repeat((torch.ones(2, 4), torch.ones(2, 4))))
    for call in (engine, engine.backward, engine.step):
        with pytest.raises(PipelineError, match=r"a pipeline trains by engine\.train_batch"):
            call(torch.ones(2, 4))
    engine.destroy()


def test_schedules_that_do_not_fit_the_module_are_refused() -> None:
    model = PipelineModule([nn.Linear(4, 4)] * 2, 1, virtual_stages=2)
    with pytest.raises(ConfigError, match=r'pipeline.schedule: "1f1b" knows one stage a rank'):
        start(model, configuration())
