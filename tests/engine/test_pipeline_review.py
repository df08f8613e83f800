"""Pipelines of models as users write them, and what is left behind by a step that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import MICROBATCHES, configuration, start, weights
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.pipe import PipelineError, PipelineModule

mse = nn.functional.mse_loss


def data(microbatches: int = MICROBATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(microbatches)
    ]


def writing() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))


def repeated() -> nn.Sequential:
    torch.manual_seed(0)
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))


MODELS = {"writing": (writing, [0, 1, 4]), "repeated": (repeated, [0, 2, 5])}


def model_job(rank: int, name: str) -> dict[str, Tensor]:
    make, bounds = MODELS[name]
    engine = start(PipelineModule(make(), 2, loss_fn=mse, partition_method=bounds), configuration())
    engine.train_batch(iter(data()))
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_stages_that_write_to_their_input_and_modules_that_are_called_twice(ranks: Ranks, name: str) -> None:
    first, last = ranks.run(2, model_job, name)
    whole = MODELS[name][0]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for x, y in data():
        (mse(whole(x), y) / MICROBATCHES).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    found = first | last
    assert found.keys() == dict(whole.named_parameters()).keys()
    for key, param in whole.named_parameters():
        assert (found[key] - param).abs().max().item() < 1e-6


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    model = nn.Module()
    model.body = Own(nn.Linear(2, 2), nn.Linear(2, 2))
    model.head = nn.Linear(2, 2)
    part = PipelineModule(["body", "head"], model=model)
    part.arrange(1, 0)
    assert part.bounds == [0, 2]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return (self.weight * (output - labels) ** 2).mean()


def loss_job(rank: int) -> tuple[list[str], bool, bool]:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=Weighted())
    engine = start(module, configuration())
    loss, outputs = engine.eval_batch(iter(data()), return_logits=True)
    same = bool(engine.eval_batch(iter(data()), reduce_output="avg") == loss)
    engine.destroy()
    return [name for name, _ in module.named_parameters()], outputs is not None, same


def test_a_loss_that_is_a_module_is_on_the_last_stage(ranks: Ranks) -> None:
    assert ranks.run(2, loss_job) == [
        (["0.weight", "0.bias"], False, True),
        (["loss_fn.weight", "1.weight", "1.bias"], True, True),
    ]


class Breaks(nn.Module):
    """Fails in a given call, once."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.left = call

    def forward(self, x: Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("cannot go on")
        return self.linear(x)


def attempt(call: Any) -> str:
    try:
        call()
    except (PipelineError, ArithmeticError) as error:
        return str(error)
    return "done"


def failed_job(rank: int, at: int, schedule: str) -> list[str]:
    module = PipelineModule([nn.Linear(4, 4), Breaks(at)], 2, loss_fn=mse, partition_method="uniform")
    engine = start(module, configuration(gradient_accumulation_steps=8, pipeline={"schedule": schedule}))
    said = [attempt(lambda: engine.eval_batch(iter(data(8)))) for _ in range(2)]
    said += [attempt(lambda: engine.train_batch(iter(data(8)))) for _ in range(2)]
    engine.destroy()  # waits for nobody
    return said


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_nothing_is_left_under_way_by_a_step_that_failed(ranks: Ranks, schedule: str) -> None:
    """The first stage of an evaluation sends and receives nothing, and is told nevertheless."""
    first, last = ranks.run(2, failed_job, 2, schedule)
    where = "in layer 1 (Breaks) of the pipeline, called on a tensor of shape (2, 4)"
    cause = f"rank 1: stage 1 of the pipeline failed: ArithmeticError: cannot go on; {where}"
    assert first == [cause, "done", "done", "done"]
    assert last == ["cannot go on", "done", "done", "done"]
    first, last = ranks.run(2, failed_job, 8 + 8 + 3, schedule)
    assert (first[:2], last[:3]) == (["done", "done"], ["done", "done", "cannot go on"])
    assert first[2] == cause
    if schedule != "gpipe":  # there it fails before any gradient is made, and nothing is lost
        assert "an earlier step of this engine failed half-way" in first[3]
        assert first[3] == last[3]
    else:
        assert first[3] == last[3] == "done"


def refused_job(rank: int, what: str) -> str:
    config = configuration()
    loss: Any = mse
    if what == "optimizer":
        del config["optimizer"]
    if what == "detached":
        loss = lambda output, labels: mse(output, labels).detach()  # noqa: E731
    layers: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if what == "tuple":
        layers, loss = [nn.Linear(4, 4), lambda x: (x, x)], None
    engine = start(PipelineModule(layers, 2, loss_fn=loss, partition_method="uniform"), config)
    try:
        if what == "tuple":
            engine.eval_batch(iter(data()))
        else:
            engine.train_batch(data() if what == "list" else iter(data()))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("optimizer", "train_batch: there is no optimizer"),
        ("detached", "train_batch: the loss depends on no parameter that is trained"),
        ("list", "train_batch: data_iter is a list, and not an iterator"),
        ("tuple", "eval_batch: the last layer returned a tuple, which is no loss"),
    ],
)
def test_what_would_train_nothing_is_refused(ranks: Ranks, what: str, says: str) -> None:
    found = ranks.run(2, refused_job, what)
    assert any(text.startswith(says) for text in found)
    assert "nothing" not in found


def deepspeed_job(rank: int) -> list[Any]:
    stretches: list[str] = []

    def called(stretch: Any, inputs: Any) -> Any:
        stretches.append(stretch.__qualname__)
        return stretch(inputs)

    layers = [nn.Linear(4, 4) for _ in range(4)]
    module = PipelineModule(
        layers, 2, loss_fn=mse, activation_checkpoint_interval=1, activation_checkpoint_func=called, dynamic_shape=False
    )
    engine = start(module, configuration())
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.train_batch(iter([{"x": x, "y": y} for x, y in data()]))
    engine.destroy()
    return sorted(set(stretches))


def test_what_deepspeeds_users_pass(ranks: Ranks) -> None:
    assert ranks.run(2, deepspeed_job) == [["layers 0 to 0", "layers 1 to 1"], ["layers 2 to 2", "layers 3 to 3"]]
