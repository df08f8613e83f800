"""A pipeline that fails anywhere fails on every rank, soon, with the cause named, and leaves nothing under way."""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_models import configuration, start
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn

from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec, failure
from dsprof.engine.zero import GatheredParameters

mse = nn.functional.mse_loss


class BuildsNot(nn.Linear):
    """Can be built on one rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__(4, 4)
        if torch.distributed.get_rank() != rank:
            raise OSError("no such file")


def building_job(rank: int, early: bool) -> str:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(BuildsNot, 0)]
    try:
        if early:
            PipelineModule(layers, 2, partition_method="uniform")
        else:
            start(PipelineModule(layers, partition_method="uniform"), configuration(pipeline={"stages": 2}))
    except PipelineError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("early", [True, False])
def test_a_layer_that_cannot_be_built_on_one_rank_is_told_on_all(ranks: Ranks, early: bool) -> None:
    own = "layer 1 (BuildsNot) could not be built on rank 1: OSError: no such file"
    assert ranks.run(2, building_job, early) == [f"PipelineModule: failed on rank 1: PipelineError: {own}", own]


class Breaks(nn.Module):
    """Fails in one replica, forward or backward, in the second micro-batch."""

    def __init__(self, replica: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = torch.distributed.get_rank() % 2 == replica
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if not self.breaks or self.calls < 2:
            return y
        if self.how == "forward":
            raise ArithmeticError("cannot go on")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        y.register_hook(_fail)
        return y


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("cannot go back")


def replica_job(rank: int, how: str, stage: int) -> tuple[list[str], float]:
    """Two pipelines of two stages, of which the second fails."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(stage, LayerSpec(Breaks, 1, how))  # type: ignore[arg-type]
    module = PipelineModule(layers, 2, loss_fn=mse, partition_method=[0, 1 + (stage == 0), 3])
    with mock.patch.object(failure, "GRACE_S", 0.5):
        engine = start(module, configuration(zero_optimization={"stage": stage + 1}))
    began, said = time.monotonic(), []
    for _ in range(2):
        try:
            engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 4))
        except (RuntimeError, ArithmeticError, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "stage", "what"),
    [
        ("forward", 0, "ArithmeticError: cannot go on"),
        ("backward", 1, "ArithmeticError: cannot go back"),
        ("interrupt", 1, "KeyboardInterrupt: "),
    ],
)
def test_one_replica_that_fails_ends_the_job(ranks: Ranks, how: str, stage: int, what: str) -> None:
    """The other waits for its gradients, which never come."""
    failing = 2 * stage + 1
    for rank, (said, seconds) in enumerate(ranks.run(4, replica_job, how, stage)):
        cause = f"PipelineError: rank {failing}: stage {stage} of the pipeline failed: {what}"
        if how == "forward":
            cause += "; in layer 0 (Breaks) of the pipeline, called on a tensor of shape (2, 4)"
        assert said[0] == (what if rank == failing else cause)
        assert "lost each other" in said[1] or "failed half-way" in said[1]
        assert seconds < 60  # that of the group's timeout, in which nobody waited here


def unread_job(rank: int) -> list[str]:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=mse)
    engine = start(module, configuration())
    said = []
    for call in (engine.train_batch, lambda: engine.eval_batch(None)):
        with pytest.raises((PipelineError, ValueError)) as refused:
            call()
        said.append(str(refused.value))
    engine.destroy()
    return said


def test_data_that_are_not_there_are_told_on_all_ranks(ranks: Ranks) -> None:
    for train, evaluate in ranks.run(2, unread_job):
        assert "train_batch: pass an iterator of batches" in train
        assert "eval_batch: pass an iterator of batches" in evaluate


# --- ranks that want different pipelines


def row(count: int = 4) -> list[Any]:
    return [nn.Linear(4, 4) for _ in range(count)]


def tied(last: str) -> list[Any]:
    return [TiedLayerSpec("first", nn.Linear, 4, 4), nn.Tanh(), TiedLayerSpec(last, nn.Linear, 4, 4)]


def different_job(rank: int) -> list[str]:
    """The other rank's pipeline is another one, each time in another way."""
    other = rank == 1

    def begun(layers: list[Any], config: dict[str, Any], **more: Any) -> Any:
        return start(PipelineModule(layers, 2, loss_fn=mse, **more), configuration(**config))

    said = []
    for attempt in (
        lambda: begun(row(), {}, partition_method=[0, 1, 4] if other else [0, 3, 4]),
        lambda: begun(row(5 if other else 4), {}),
        lambda: begun([*row(), nn.Tanh() if other else nn.ReLU()], {}),
        lambda: begun(tied("last" if other else "first"), {}),
        lambda: begun([LayerSpec(nn.Linear, 4, 40 if other else 4), LayerSpec(nn.Linear, 4, 4), *row()], {}),
    ):
        with pytest.raises(PipelineError) as refused:
            attempt()
        said.append(str(refused.value))
    return said


def test_ranks_with_different_pipelines_are_told_so_on_all(ranks: Ranks) -> None:
    """They would train another model than anybody wrote, or wait for each other."""
    first, second = ranks.run(2, different_job)
    assert first == second
    assert first == [
        f"the ranks of the job have different pipelines: {what}; give all ranks the same"
        for what in (
            "partition_method: rank 0 has [0, 3, 4], and rank 1 has [0, 1, 4]",
            "number of layers: rank 0 has 4, and rank 1 has 5",
            "layer 4: rank 0 has 4 (ReLU), and rank 1 has 4 (Tanh)",
            "layer 2: rank 0 has 2 (Linear, tied as 'first'), and rank 1 has 2 (Linear, tied as 'last')",
            "bounds: rank 0 has [0, 3, 6], and rank 1 has [0, 1, 6]",
        )
    ]


def measured_job(rank: int) -> tuple[list[int], torch.dtype, bool]:
    """Each rank has measured; what the second found would leave two layers to nobody."""
    costs = [1.0, 1.0, 1.0, 9.0] if rank == 0 else [9.0, 1.0, 1.0, 1.0]
    module = PipelineModule(row(), 2, loss_fn=mse, partition_method="measured", costs=costs).double()
    engine = start(module, configuration())
    batch = (torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64))
    whole = engine.eval_batch(iter([batch] * 4))
    loss = engine.train_batch(iter([batch] * 4))
    with pytest.raises(PipelineError, match=r"engine\.no_sync: train_batch runs all micro-batches"), engine.no_sync():
        pass
    engine.destroy()
    return module.bounds, loss.dtype, bool((loss - whole).abs() < 1e-12)


def test_layers_are_divided_by_what_the_first_rank_has_measured(ranks: Ranks) -> None:
    """And the loss of a model in float64 is told in it."""
    assert ranks.run(2, measured_job) == [([0, 3, 4], torch.float64, True)] * 2


# --- what cannot be sent, and layers that take more than they get


class OfItsOwn(Tensor):
    pass


def nested_of(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1, :2]])


def own_of(x: Tensor) -> Tensor:
    return x.as_subclass(OfItsOwn)


def unsendable_job(rank: int) -> list[str]:
    said = []
    for layer in (nested_of, own_of):
        module = PipelineModule([nn.Linear(4, 4), layer, nn.Linear(4, 4)], 2, loss_fn=mse, partition_method=[0, 2, 3])
        engine = start(module, configuration())
        with pytest.raises(PipelineError) as refused:
            engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 4))
        said.append(str(refused.value).removeprefix("rank 0: "))
        engine.destroy()
    return said


def test_tensors_that_are_more_than_numbers_in_rows_are_not_sent(ranks: Ranks) -> None:
    for nested, own in ranks.run(2, unsendable_job):
        ends = (
            "returned {}, which cannot be sent to the next stage; return what is in it as plain tensors, or divide the "
            "layers elsewhere"
        )
        assert nested == "layer 1 (nested_of), the last of stage 0 of the pipeline, " + ends.format("a nested tensor")
        assert ends.format("a tensor of the class OfItsOwn") in own


class Rotates(nn.Module):
    """Takes what the model's own forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Any:
        assert angles is not None
        return self.linear(x) * angles


def test_an_error_names_the_layer_and_what_a_pipeline_leaves_out() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "blocks": nn.ModuleList([Rotates()])})
    part = PipelineModule(["up", "blocks"], model=model)
    part.arrange(1, 0)
    with pytest.raises(AssertionError) as failed:
        part(torch.ones(2, 4))
    assert failed.value.__notes__ == [
        "in layer blocks.0 (Rotates) of the pipeline, called on a tensor of shape (2, 4) and nothing else: the model's "
        "own forward does not run, and what it makes for its modules (masks, positions) has to be made in a layer"
    ]
    with pytest.raises(ValueError, match=r"wrap those whose outputs it adds in a module that does so"):
        PipelineModule(["blocks"], model=model)


@pytest.mark.parametrize("layer", [nn.Linear, functools.partial(nn.Linear, 4, 4)])
def test_a_class_is_no_layer(layer: Any) -> None:
    with pytest.raises(TypeError, match=r"layer 1 is the class Linear, .* write LayerSpec\(Linear, \.\.\.\)"):
        PipelineModule([nn.Tanh(), layer])


# --- after a step that failed


def samples(microbatches: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, 4), torch.zeros(2, 4))] * microbatches


class BreaksOnce(nn.Module):
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
    module = PipelineModule([nn.Linear(4, 4), BreaksOnce(at)], 2, loss_fn=mse, partition_method="uniform")
    engine = start(module, configuration(gradient_accumulation_steps=8, pipeline={"schedule": schedule}))
    said = [attempt(lambda: engine.eval_batch(iter(samples(8)))) for _ in range(2)]
    said += [attempt(lambda: engine.train_batch(iter(samples(8)))) for _ in range(2)]
    engine.destroy()  # waits for nobody
    return said


def ended_data_job(rank: int, schedule: str, stage: int) -> tuple[list[str], list[float]]:
    """The data end in the sixth of eight micro-batches, on every replica; then they go on. What the steps say, and
    the weights here less those of an engine whose data never ended."""
    weights = []
    said = []
    for ends in (True, False):
        torch.manual_seed(0)
        module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=mse, partition_method="uniform")
        zero = {"stage": stage, "reduce_bucket_size": 16, "stage3_param_persistence_threshold": 0}
        more = {"zero_optimization": zero if stage else {"stage": 0}, "pipeline": {"schedule": schedule}}
        engine = start(module, configuration(gradient_accumulation_steps=8, **more))
        for count in (8, 5, 8) if ends else (8, 8):
            said.append(attempt(functools.partial(engine.train_batch, iter(samples(count)))))
        with GatheredParameters(engine.module.parameters()):
            weights.append([param.detach().clone() for param in engine.module.parameters()])
        engine.destroy()
    return said, [(one - other).abs().max().item() for one, other in zip(*weights, strict=True)]


@pytest.mark.parametrize(
    ("schedule", "stage", "replicas"),
    slow_but(
        [("1f1b", 0, 1), ("zero-bubble", 3, 2), ("gpipe", 1, 2)],
        among=[("1f1b", 0, 1), ("1f1b", 2, 2), ("zero-bubble", 3, 2), ("gpipe", 1, 2)],
    ),
)
def test_a_step_whose_data_end_can_be_begun_anew(ranks: Ranks, schedule: str, stage: int, replicas: int) -> None:
    """In `make test` each schedule once, 1f1b without replicas."""
    for said, differences in ranks.run(2 * replicas, ended_data_job, schedule, stage):
        assert said[0] == said[2] == said[3] == said[4] == "done"
        assert "the iterator ended after 5 micro-batches of the step" in said[1]
        assert differences == [0.0] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_nothing_is_left_under_way_by_a_step_that_failed(ranks: Ranks, schedule: str) -> None:
    """The first stage of an evaluation sends and receives nothing, and is told nevertheless."""
    first, last = ranks.run(2, failed_job, 2, schedule)
    where = "in layer 1 (BreaksOnce) of the pipeline, called on a tensor of shape (2, 4)"
    cause = f"rank 1: stage 1 of the pipeline failed: ArithmeticError: cannot go on; {where}"
    assert first == [cause, "done", "done", "done"]
    assert last == ["cannot go on", "done", "done", "done"]
    first, last = ranks.run(2, failed_job, 8 + 8 + 3, schedule)
    assert (first[:2], last[:3]) == (["done", "done"], ["done", "done", "cannot go on"])
    assert first[2] == cause
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
            engine.eval_batch(iter(samples()))
        else:
            engine.train_batch(samples() if what == "list" else iter(samples()))  # type: ignore[arg-type]
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
