"""Compiled models: by the script, before `initialize`, or by `engine.compile`; whole, in blocks, in pipelines.

The backend is `aot_eager`: it traces forwards and backwards as inductor does, and generates no code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from engines import WIDTH, configuration, engine_for
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.pipe import PipelineModule
from dsprof.engine.pipe.runtime import PipelineRun

BACKEND: Final = "aot_eager"
STEPS: Final = 3
BLOCKS: Final = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sample(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_alone(ranks: int) -> dict[str, Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(sample(step, rank)) for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend=BACKEND)


def itself(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def each_block(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model  # type: ignore[no-any-return]


def wrapped_block(model: Any) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], backend=BACKEND)
    return model  # type: ignore[no-any-return]


def compiled_job(rank: int, prepare: Callable[[nn.Module], nn.Module] | None, stage: int, **more: Any) -> Any:
    """The weights after training, by their names in the model; or what `initialize` said."""
    torch._dynamo.reset()
    model = Model()
    prepared = model if prepare is None else prepare(model)
    try:
        with engine_for(prepared, configuration(stage, **more)) as engine:
            if prepare is None:
                engine.compile(backend=BACKEND)
            for step in range(STEPS):
                engine.backward(engine(sample(step, rank)))
                engine.step()
    except ValueError as error:
        return str(error)
    return {name.replace("_orig_mod.", ""): param.detach().clone() for name, param in model.named_parameters()}


def checkpointed_job(rank: int, stage: int) -> Any:
    return compiled_job(rank, None, stage, activation_checkpointing={"policy": "full"})


def check(found: Any) -> None:
    expected = trained_alone(2)
    for weights in found:
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            assert torch.allclose(value, expected[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("prepare", "stage"), [(whole, 2), (itself, 1), (each_block, 0), (wrapped_block, 2), (None, 1), (None, 2)]
)
def test_a_compiled_model_trains_as_one_that_is_not(ranks: Ranks, prepare: Any, stage: int) -> None:
    check(ranks.run(2, compiled_job, prepare, stage))


@pytest.mark.parametrize("stage", [2])
def test_blocks_that_are_compiled_may_be_recomputed(ranks: Ranks, stage: int) -> None:
    check(ranks.run(2, checkpointed_job, stage))


@pytest.mark.parametrize(
    ("prepare", "what"),
    [(whole, "the model"), (itself, "the model"), (each_block, "blocks.0"), (wrapped_block, "blocks.1")],
)
def test_stage_3_answers_with_a_sentence(ranks: Ranks, prepare: Any, what: str) -> None:
    for said in ranks.run(2, compiled_job, prepare, 3):
        assert said == (
            f"initialize: {what} is compiled, and ZeRO stage 3 fetches parameters while modules run, which "
            "torch.compile cannot follow: use stage 0, 1 or 2, or leave it out"
        )


def compiled_later(rank: int, how: str) -> str:
    with engine_for(Model(), configuration(3)) as engine:
        block = engine.module.blocks[1]
        if how == "method":
            block.compile(backend=BACKEND)
        else:
            block.forward = torch.compile(block.forward, backend=BACKEND)
        with pytest.raises(RuntimeError) as caught:
            engine(sample(0, rank))
        return str(caught.value)


@pytest.mark.parametrize("how", ["method", "forward"])
def test_stage_3_refuses_what_is_compiled_after_initialize(ranks: Ranks, how: str) -> None:
    for said in ranks.run(2, compiled_later, how):
        assert said.startswith("forward: blocks.1 is compiled, and ZeRO stage 3 fetches parameters")


# --- gradients of a compiled model are reduced while it computes


def overlap_job(rank: int, stage: int) -> tuple[int, int, int]:
    """Compiled backwards; reductions that have begun when the first block's gradients come, and in all."""
    torch._dynamo.reset()
    model = Model()
    with engine_for(model, configuration(stage, zero={"reduce_bucket_size": 1})) as engine:
        engine.compile(backend=BACKEND)
        for step in range(2):
            engine.backward(engine(sample(step, rank)))
            engine.step()
        comm = engine.zero.comms[0]
        before = comm.begun
        begun: list[int] = []
        handles = [
            param.register_post_accumulate_grad_hook(lambda _: begun.append(comm.begun - before))
            for param in model.blocks[0].parameters()
        ]
        loss = engine(sample(2, rank))
        graph, seen = [loss.grad_fn], set[Any]()
        while graph:
            node = graph.pop()
            if node is not None and node not in seen:
                seen.add(node)
                graph += [following for following, _ in node.next_functions]
        compiled = sum(type(node).__name__ == "CompiledFunctionBackward" for node in seen)
        engine.backward(loss)
        for handle in handles:
            handle.remove()
        return compiled, begun[0], comm.begun - before


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_blocks_have_backwards_of_their_own_between_which_gradients_are_sent(ranks: Ranks, stage: int) -> None:
    for compiled, begun, every in ranks.run(2, overlap_job, stage):
        assert compiled == BLOCKS
        others = 6 * (BLOCKS - 1)  # parameters of the blocks behind the first, with a bucket each
        assert begun >= others
        assert every > begun


def test_one_rank_has_nothing_to_overlap_and_compiles_the_model_as_one() -> None:
    torch._dynamo.reset()
    with engine_for(Model(), configuration()) as engine:
        engine.compile(backend=BACKEND)
        assert engine.module._compiled_call_impl is not None
        loss = engine(sample(0, 0))
        assert type(loss.grad_fn).__name__ == "CompiledFunctionBackward"


# --- pipelines


def pipeline_job(rank: int, how: str, schedule: str) -> tuple[list[float], list[int]]:
    """Losses of the steps, and how much each W had to do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers: list[Any] = [Block() for _ in range(4)]
    if how == "wrapped":
        layers = [torch.compile(layer, backend=BACKEND) for layer in layers]
    if how == "itself":
        for layer in layers:
            layer.compile(backend=BACKEND)
    model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = configuration(pipeline={"schedule": schedule}, gradient_accumulation_steps=4)
    engine, *_ = ds.initialize(model=model, config=config)
    if how == "engine":
        engine.compile(backend=BACKEND)
    worked: list[int] = []
    whole_w = PipelineRun._weights_backward

    def counting(self: PipelineRun, action: Any, final: bool) -> None:
        worked.append(len(self._put_off[action.stage, action.microbatch]))
        whole_w(self, action, final)

    PipelineRun._weights_backward = counting  # type: ignore[method-assign]
    try:
        data = [(number * torch.ones(2, WIDTH), torch.zeros(2, WIDTH)) for number in range(4)]
        losses = [engine.train_batch(iter(data)).item() for _ in range(STEPS)]
    finally:
        PipelineRun._weights_backward = whole_w  # type: ignore[method-assign]
        engine.destroy()
    return losses, worked


@pytest.mark.parametrize(
    ("how", "schedule"),
    [("engine", "1f1b"), ("wrapped", "zero-bubble"), ("itself", "zero-bubble"), ("engine", "zero-bubble")],
)
def test_layers_of_a_pipeline_may_be_compiled(ranks: Ranks, how: str, schedule: str) -> None:
    """With zero-bubble, too, the weight gradients of their linear layers are put off."""
    expected = ranks.run(2, pipeline_job, "no", schedule)
    for (losses, worked), (others, put_off) in zip(ranks.run(2, pipeline_job, how, schedule), expected, strict=True):
        assert losses == pytest.approx(others, abs=1e-6)
        assert worked == put_off
        assert worked == ([4] * 4 * STEPS if schedule == "zero-bubble" else [])
