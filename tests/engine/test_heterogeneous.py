"""Ranks of unequal speed: shares of a batch and of a pipeline's layers, held against the same batch in one process."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from config_coverage import alive
from models import Numbers
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsprof import engine as ds
from dsprof.engine.config import ConfigError, key_takes, load
from dsprof.engine.config.parallel import divide, replica_speeds, stage_speeds
from dsprof.engine.data import RepeatingLoader, ShardedLoader, _CountingSampler
from dsprof.engine.pipe import LayerSpec, PipelineModule

Speeds = Sequence[float | None]

WIDTH, SAMPLES, STEPS, ACCUMULATE = 6, 42, 20, 2


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(WIDTH, dtype=torch.float64) * (index + 1))
        return x, x.cumsum(0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def layers() -> list[Any]:
    specs: list[Any] = []
    for _ in range(3):
        specs += [LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), torch.tanh]
    return specs


def module(**more: Any) -> PipelineModule:
    return PipelineModule(layers(), loss_fn=nn.functional.mse_loss, seed_layers=True, **more)


class Whole(nn.Module):
    """The same model, which returns its loss, and has a layer that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = module()
        self.inner.arrange(1, 0)
        self.unused = nn.Linear(2, 2).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.inner(x), y)


def configuration(speeds: Any, samples: int, **more: Any) -> dict[str, Any]:
    """`samples` in a micro-batch of all replicas."""
    return {
        "train_batch_size": samples * ACCUMULATE,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **({} if speeds is None else {"heterogeneous": {"speeds": speeds}}),
        **more,
    }


def in_one_process(samples: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of plain torch on whole batches of a step, and the weights it ends with."""
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    order = _CountingSampler(Points(), 1, 0, shuffle=True, seed=0)
    losses: list[float] = []
    while len(losses) < STEPS:
        order.begin()
        whole = DataLoader(Points(), batch_size=samples * ACCUMULATE, sampler=order)
        for batch in itertools.islice(whole, STEPS - len(losses)):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def quiet_initialize(**arguments: Any) -> Any:
    """An engine whose own loader has no workers: the ranks of tests may have no children."""
    defaults = ShardedLoader.__init__.__kwdefaults__
    workers, defaults["num_workers"] = defaults["num_workers"], 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ds.initialize(**arguments)[0]
    finally:
        defaults["num_workers"] = workers


def train(
    rank: int, stage: int, speeds: Speeds, samples: int, memory: Speeds | None = None
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Each step's loss on this rank, the sizes of its batches, and the weights at the end."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    config = configuration(list(speeds), samples, zero_optimization=zero)
    config["heterogeneous"]["memory"] = memory
    engine = quiet_initialize(model=Whole(), config=config, training_data=Points())
    losses, sizes = [], set[int]()
    batches = RepeatingLoader(engine.training_dataloader)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(ACCUMULATE):
            x, y = next(batches)
            sizes.add(len(x))
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATE
        losses.append(total)
    assert engine.global_samples == STEPS * samples * ACCUMULATE
    assert engine.train_batch_size() == samples * ACCUMULATE
    share = engine.train_micro_batch_size_per_gpu()
    engine.destroy()
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return losses, [share, *sizes], weights


SHARES = {"two": ((1, 2), 3, (1, 2)), "three": ((1, 2, 4), 7, (1, 2, 4)), "none": ((0.1, None, 0.2), 3, (1, 0, 2))}
"""Speeds, samples, and the share of them that each rank has."""


@pytest.mark.parametrize(
    ("stage", "kind"),
    slow_but(
        [(0, "three"), (1, "none"), (2, "three"), (2, "none"), (3, "two"), (3, "none")],
        among=itertools.product((0, 1, 2, 3), SHARES),
    ),
)
def test_unequal_shares_train_as_one_process_does(ranks: Ranks, stage: int, kind: str) -> None:
    """In `make test` each stage with one kind of shares or two, and a rank that has none in every stage but 0."""
    speeds, samples, shares = SHARES[kind]
    expected, weights = in_one_process(samples)
    found = ranks.run(len(speeds), train, stage, speeds, samples)
    assert [sizes for _, sizes, _ in found] == [[share, max(1, share)] for share in shares]
    of_ranks = zip(*(losses for losses, _, _ in found), strict=True)
    means = [sum(n * loss for n, loss in zip(shares, losses, strict=True)) / samples for losses in of_ranks]
    assert means == pytest.approx(expected, abs=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][2][name], weight, rtol=0, atol=1e-9)


def test_speeds_and_memory_go_together(ranks: Ranks) -> None:
    """The fast rank gets two samples of three, and has the smaller part of the state."""
    expected, weights = in_one_process(3)
    found = ranks.run(2, train, 3, (1, 2), 3, [3, 1])
    assert [(a + 2 * b) / 3 for a, b in zip(found[0][0], found[1][0], strict=True)] == pytest.approx(expected, abs=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][2][name], weight, rtol=0, atol=1e-9)


def train_pipeline(rank: int, stage: int, speeds: Speeds, samples: int) -> tuple[list[float], list[float], int]:
    config = configuration(list(speeds), samples, zero_optimization={"stage": stage}, pipeline={"stages": 2})
    engine = quiet_initialize(model=module(), config=config, training_data=Points())
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    evaluated = engine.eval_batch(iter(engine.deepspeed_io(Points(), route="eval", num_local_io_workers=0))).item()
    engine.destroy()
    return losses, [evaluated], engine.train_micro_batch_size_per_gpu()


OF_REPLICAS = {"shares": ((1, 2, 1, 2), (1, 2)), "one has nothing": ((3, 1, 3, None), (3, 0))}
"""Speeds of the ranks of two stages, and the share that each replica has."""


@pytest.mark.parametrize(
    ("stage", "kind"),
    slow_but([(0, "one has nothing"), (2, "shares")], among=itertools.product((0, 2), OF_REPLICAS)),
)
def test_replicas_of_a_pipeline_have_unequal_shares(ranks: Ranks, stage: int, kind: str) -> None:
    """In `make test` each stage and each kind of shares once."""
    speeds, shares = OF_REPLICAS[kind]
    expected, _ = in_one_process(3)
    for losses, _, share in (found := ranks.run(4, train_pipeline, stage, speeds, 3)):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert share in shares
    assert len({evaluated for _, (evaluated,), _ in found}) == 1


class Spoilt(nn.Module):
    """A model whose loss is NaN on `spoils`, if it says so, as a logarithm of nothing is."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, WIDTH, dtype=torch.float64)
        self.inner = Whole()
        self.factor = torch.nan if spoils else 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.table(torch.arange(len(x)) % 5)
        loss: Tensor = self.inner(x.to(rows.dtype) + rows, y) * self.factor
        return loss


def train_spoilt(rank: int, spoils: bool, keys: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """The weights, and the last norm of the gradients; the last of three ranks has no samples."""
    config = configuration([1, 2, None], 3, **keys)
    engine = quiet_initialize(model=Spoilt(spoils and rank == 2), config=config, training_data=Points())
    batches = RepeatingLoader(engine.training_dataloader)
    for _ in range(2 * ACCUMULATE):
        engine.backward(engine(*next(batches)))
        engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return [param.detach().clone() for param in engine.module.parameters()], norm


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1, "contiguous_gradients": False}, "sparse_gradients": True},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 30, "reduce_scatter": False}},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "bf16": {"enabled": True}},
    ],
    ids=["stage 0", "stage 1, rows", "stage 2", "stage 3, bf16"],
)
def test_a_loss_that_is_not_a_number_of_a_rank_without_samples_does_not_count(
    ranks: Ranks, keys: dict[str, Any]
) -> None:
    found = ranks.run(3, train_spoilt, True, keys)
    expected = ranks.run(3, train_spoilt, False, keys)
    for (weights, norm), (others, other) in zip(found, expected, strict=True):
        assert norm == other
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def train_spoilt_pipeline(rank: int, spoils: bool) -> tuple[list[float], list[Tensor]]:
    """The second replica has no samples."""
    factor = torch.nan if spoils and rank % 2 == 1 else 1.0
    model = PipelineModule([*layers(), lambda x: x * factor], loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = configuration([3, 1, 3, None], 3, zero_optimization={"stage": 2}, pipeline={"stages": 2})
    engine = quiet_initialize(model=model, config=config, training_data=Points())
    losses = [engine.train_batch().item() for _ in range(2)]
    engine.destroy()
    return losses, [param.detach().clone() for param in engine.module.parameters()]


def test_nor_does_that_of_a_pipeline_without_samples(ranks: Ranks) -> None:
    found, expected = ranks.run(4, train_spoilt_pipeline, True), ranks.run(4, train_spoilt_pipeline, False)
    for (losses, weights), (others, their) in zip(found, expected, strict=True):
        assert losses == others
        assert all(torch.equal(a, b) for a, b in zip(weights, their, strict=True))


def evaluate(rank: int, speeds: Speeds, as_shared: bool) -> float:
    """The mean loss where the first replica's is 1 and the second's 4, of 1 and 2 samples, or of 3 on each."""
    config = configuration(list(speeds), 3, pipeline={"stages": 2})
    engine = quiet_initialize(model=PipelineModule([nn.Identity()] * 2, loss_fn=nn.functional.mse_loss), config=config)
    replica = rank % 2
    size = 1 + replica if as_shared else 3
    batch = torch.zeros(size, WIDTH, dtype=torch.float64), torch.full((size, WIDTH), 1.0 + replica).double()
    loss: float = engine.eval_batch(itertools.repeat(batch)).item()
    engine.destroy()
    return loss


def test_an_evaluation_counts_batches_as_large_as_they_are(ranks: Ranks) -> None:
    assert ranks.run(4, evaluate, (1, 2, 1, 2), True) == [(1 + 2 * 4) / 3] * 4
    assert ranks.run(4, evaluate, (1, 2, 1, 2), False) == [(1 + 4) / 2] * 4
    assert ranks.run(4, evaluate, (1, None, 1, None), False) == [(1 + 4) / 2] * 4


# --- who gets what


@pytest.mark.parametrize(
    ("samples", "speeds", "found"),
    [
        (12, (1, 2), [4, 8]),
        (3, (0.1, 0.2), [1, 2]),
        (5, (1, 1), [3, 2]),
        (10, (1, 0, 1.5), [4, 0, 6]),
        (7, (100, 0.1, 0.1), [7, 0, 0]),
        (32, (1, 1, 2), [8, 8, 16]),
    ],
)
def test_shares_of_samples(samples: int, speeds: Sequence[float], found: list[int]) -> None:
    assert divide(samples, speeds) == found


def test_no_other_shares_end_earlier() -> None:
    for speeds in ((1.0, 2.9, 1.3), (0.3, 0.31, 5.0)):
        for samples in range(1, 9):
            slowest = max(n / speed for n, speed in zip(divide(samples, speeds), speeds, strict=True))
            for a, b in itertools.product(range(samples + 1), repeat=2):
                if a + b <= samples:
                    other = zip((a, b, samples - a - b), speeds, strict=True)
                    assert slowest <= max(n / speed for n, speed in other) + 1e-12


def test_replicas_of_stages_and_parts() -> None:
    assert replica_speeds([1, 2, 4], 1, 1) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert replica_speeds([1, 2, 2, 4], 1, 2) == pytest.approx([1 / 3, 2 / 3])  # the slowest of those that share layers
    assert stage_speeds([1, 2, 2, 4], 2, 1) == [3, 6]
    assert replica_speeds([1, 2, 2, 4], 2, 1) == pytest.approx([1 / 3, 2 / 3])
    assert stage_speeds([1, None, 2, 4], 2, 1) == [1, 2]
    assert replica_speeds([1, None, 2, 4], 2, 1) == [1, 0]


# --- layers


def stages(rank: int, speeds: Any, method: Any = "uniform") -> list[int]:
    config = configuration(speeds, 6, pipeline={"stages": 2, "partition_method": method})
    engine = quiet_initialize(model=module(), config=config, training_data=Points())
    bounds = engine.module.bounds
    engine.destroy()
    assert isinstance(bounds, list)
    return bounds


def test_a_faster_stage_has_more_layers(ranks: Ranks) -> None:
    assert ranks.run(2, stages, [1, 2]) == [[0, 2, 6]] * 2
    assert ranks.run(2, stages, [2, 1]) == [[0, 4, 6]] * 2
    assert ranks.run(2, stages, [2, 1], [0, 1, 6]) == [[0, 1, 6]] * 2  # as it was asked for
    assert ranks.run(4, stages, [1, 2, 2, 4]) == [[0, 2, 6]] * 4


# --- speeds that are measured


class Sleepy(nn.Module):
    """Takes 4 ms for a sample on rank 0, and twice as long on rank 1; it has statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(0.004 * (1 + dist.get_rank()) * len(x))
        return nn.functional.mse_loss(self.layers(x), y)


def data_of(kind: str) -> dict[str, Any]:
    points = Points()
    return {
        "data set": {"training_data": points},
        "list": {"training_data": [points[at] for at in range(len(points))]},
        "loader": {"train_dataloader": DataLoader(points, batch_size=3, shuffle=True)},
    }[kind]


def measure(rank: int, kind: str) -> tuple[int, bool, float, str]:
    """This rank's share; whether the model is as it was, and the next random number; what was written to the log."""
    model = Sleepy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    with contextlib.redirect_stderr(io.StringIO()) as log:
        engine = quiet_initialize(model=model, config=configuration("measure", 6), **data_of(kind))
    number = torch.rand(1).item()
    same = all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    share = engine.train_micro_batch_size_per_gpu()
    engine.destroy()
    return share, same, number, log.getvalue()


@pytest.mark.parametrize("kind", ["data set", "list", "loader"])
def test_speeds_are_measured_on_the_job_s_own_model(ranks: Ranks, kind: str) -> None:
    """On whole micro-batches, which batch norms take alone, wherever they come from."""
    found = ranks.run(2, measure, kind)
    torch.manual_seed(5)
    expected = torch.rand(1).item()
    assert [(share, same, number) for share, same, number, _ in found] == [(4, True, expected), (2, True, expected)]
    log, silent = found[0][3], found[1][3]
    assert silent == ""
    assert log.startswith("heterogeneous: forward and backward took ")
    assert "so their speeds are [1.0, 0." in log
    assert log.endswith("of a micro-batch the data-parallel replicas get [4, 2] samples\n")


class SleepyLayer(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * (1 + dist.get_rank()))
        return super().forward(x)


def measured_stages(rank: int, keys: dict[str, Any]) -> tuple[list[int], Any]:
    specs = [LayerSpec(SleepyLayer, seconds) for seconds in (0.04, 0.01, 0.01, 0.01, 0.01, 0.01)]
    model = PipelineModule(specs, loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = configuration("measure", 2, pipeline={"stages": 2, **keys})
    with contextlib.redirect_stderr(io.StringIO()):
        engine = quiet_initialize(model=model, config=config, training_data=Points())
    bounds, speeds = engine.module.bounds, engine.config.heterogeneous.speeds
    engine.destroy()
    return bounds, speeds


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, [0, 3, 6]), ({"partition_method": "measured"}, [0, 3, 6]), ({"partition_method": "uniform"}, [0, 4, 6])],
    ids=["by default", "measured", "uniform"],
)
def test_stages_follow_measured_speeds_and_measured_layers(
    ranks: Ranks, keys: dict[str, Any], expected: list[int]
) -> None:
    """By parameters the first stage would get four layers of six; the first takes as long as four others."""
    (bounds, speeds), other = ranks.run(2, measured_stages, keys)
    assert (bounds, speeds) == other
    assert bounds == expected
    assert speeds[0] == 1.0
    assert speeds[1] == pytest.approx(0.5, abs=0.15)


def statistics(rank: int) -> dict[str, float]:
    """Those of a batch norm in bf16, whose layer is brought there to be measured."""
    specs = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(specs, loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = configuration("measure", 6, bf16={"enabled": True}, pipeline={"stages": 2, "partition_method": [0, 2, 3]})
    with contextlib.redirect_stderr(io.StringIO()):
        engine = quiet_initialize(model=model, config=config, training_data=Points())
    found = {name: value.float().sum().item() for name, value in engine.module.named_buffers()}
    engine.destroy()
    return found


def test_measuring_leaves_a_pipeline_s_statistics(ranks: Ranks) -> None:
    (found, _) = ranks.run(2, statistics)
    assert sorted(found.values()) == [0, 0, WIDTH]  # the mean, the number of batches, and the variances


def unmeasured(rank: int, what: str) -> str:
    model = Whole()
    data: dict[str, Any] = {"fails": {"example": (torch.ones(2, WIDTH + 1), torch.ones(2))}, "nothing": {}}[what]
    try:
        quiet_initialize(model=model, config=configuration("measure", 6), **data)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_what_cannot_be_measured(ranks: Ranks) -> None:
    for said in ranks.run(2, unmeasured, "nothing"):
        assert said == (
            'heterogeneous.speeds: "measure" takes what to run the model on; pass training_data or example= to '
            "initialize, or write the speeds of the ranks as a list"
        )
    for said in ranks.run(2, unmeasured, "fails"):
        assert said.startswith('heterogeneous.speeds: "measure" could not run the model: PipelineError: measure: layer')
        assert said.endswith(
            "pass example= to initialize, what the model's forward takes, or write the speeds of the ranks as a list"
        )


# --- data


def read(loader: ShardedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def loaders(dataset: Any, shares: Sequence[int], **more: Any) -> list[ShardedLoader]:
    ranks = range(len(shares))
    return [
        ShardedLoader(
            dataset, batch_size=9, rank=rank, world_size=len(shares), num_workers=0, shares=shares,
            **{"shuffle": False, **more},
        )
        for rank in ranks
    ]  # fmt: skip


def test_a_row_of_all_ranks_is_divided() -> None:
    slow, idle, fast = loaders(Numbers(7), (1, 0, 2))
    assert read(slow) == [[0], [3], [6]]
    assert read(fast) == [[1, 2], [4, 5], [0, 1]]  # padded to whole micro-batches
    assert read(idle) == [[1], [4], [0]]  # one, that does not count
    assert [len(each) for each in (slow, idle, fast)] == [3, 3, 3]
    assert read(loaders(Numbers(7), (1, 2), drop_last=True)[1]) == [[1, 2], [4, 5]]
    assert [read(each) for each in loaders(Numbers(2), (1, 4))] == [[[0]], [[1, 0, 1, 0]]]


def test_a_stream_is_divided() -> None:
    slow, fast = loaders(Stream(), (1, 5))
    assert read(slow) == [[0], [6], [12]]
    assert read(fast) == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11], [13, 14, 15, 16, 17]]


@pytest.mark.parametrize("dataset", [Numbers(20), Stream()], ids=["data set", "stream"])
def test_the_data_go_on_behind_the_same_samples(dataset: Any) -> None:
    """From equal shares to unequal ones, and back to others."""
    equal = loaders(dataset, (2, 2))[0]
    batches = iter(ShardedLoader(dataset, batch_size=2, rank=0, world_size=2, num_workers=0, shuffle=False))
    next(batches), next(batches)
    state = batches._loader.state_dict()  # type: ignore[attr-defined]
    assert state is not None
    assert state["samples"] == 8
    fast = loaders(dataset, (1, 4))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast.load_state_dict(state)
        batches = iter(fast)
        assert next(batches).tolist() == [9, 10, 11, 12]
        state = fast.state_dict()
        assert state is not None
        assert state["samples"] == 13
        equal.load_state_dict(state)
        assert next(iter(equal)).tolist() == [13, 14]


def resume(rank: int, folder: Path, before: Any, after: Any) -> list[list[float]]:
    """Losses of six steps; then those of steps 4 to 6 after a checkpoint of step 3, at other speeds."""
    runs = []
    for speeds, load_from, steps in ((before, None, 6), (before, None, 3), (after, folder, 3)):
        config = configuration(speeds, 6, pipeline={"stages": 1})
        engine = quiet_initialize(model=module(), config=config, training_data=Points())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if load_from:
                engine.load_checkpoint(load_from)
            runs.append([engine.train_batch().item() for _ in range(steps)])
        if steps == 3 and not load_from:
            engine.save_checkpoint(folder)
        engine.destroy()
    return [runs[0][3:], runs[2]]


@pytest.mark.parametrize(("before", "after"), [(None, [1, 2]), ([1, 2], None), ([2, 1], [1, 5])])
def test_a_checkpoint_goes_on_with_other_shares(ranks: Ranks, tmp_path: Path, before: Any, after: Any) -> None:
    expected, found = ranks.run(2, resume, tmp_path, before, after)[0]
    assert found == pytest.approx(expected, abs=1e-9)


# --- what is said


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        ([1, 2, 3], '3 speeds, and the job has 2 ranks; write one for each rank, or "measure"'),
        ([1, 0], "0 for rank 1 is not a number above 0; write how fast it is beside the others, such as 0.5 for half "
         "as fast, or null for a rank that is to get no samples"),
        ([-1, 1], "-1 for rank 0 is not a number above 0"),
        ([float("nan"), 1], "NaN for rank 0 is not a number above 0"),
        (["fast", 1], '"fast" for rank 0 is not a number above 0'),
        ([1, 20], "data-parallel replica 0 would get 0.38 of the 8 samples of a micro-batch, less than one; "
         "write batch sizes with 21 samples or more in a micro-batch of all replicas, or null for its ranks, which "
         "then get none"),
        ([1e-320, 1], "data-parallel replica 0 would get 8e-320 of the 8 samples of a micro-batch, less than one; "
         "write null for its ranks, which then get none"),
        ([None, None], "null in every data-parallel replica: none gets a sample; write numbers for one at least"),
        ("mesure", '"mesure" is neither "measure" nor a list with the speed of each rank, such as [1, 2]'),
    ],
)  # fmt: skip
def test_speeds_that_cannot_be(speeds: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_micro_batch_size_per_gpu": 4, "heterogeneous": {"speeds": speeds}}, world_size=2)
    (problem,) = caught.value.problems
    assert problem.startswith(f"heterogeneous.speeds: {says}")


def test_what_speeds_can_be() -> None:
    assert key_takes("heterogeneous.speeds") == '"measure" or a list of numbers'
    assert key_takes("fp8.filter") == '"auto", "all" or a list of strings'


def test_one_bit_optimizers_are_refused_by_name() -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "OneBitAdam"}, "heterogeneous": {"speeds": [1, 2]},
    }  # fmt: skip
    with pytest.raises(ConfigError, match='"OneBitAdam" compresses what each rank has'):
        load(raw, world_size=2)


def differing(rank: int) -> str:
    try:
        quiet_initialize(model=Whole(), config=configuration([1, 1 + rank], 8))
    except ValueError as error:
        return str(error)
    return "taken"


def test_ranks_that_disagree(ranks: Ranks) -> None:
    for said in ranks.run(2, differing):
        assert "first in heterogeneous.speeds.1: rank 0 has 1.0, and rank 1 has 2.0: pass the same one" in said


def foreign_loader(rank: int) -> list[str]:
    said = []
    for doing in ("loader", "size"):
        try:
            loader = DataLoader(Points(), batch_size=2)
            data = {"training_data": loader} if doing == "loader" else {}
            engine = quiet_initialize(model=Whole(), config=configuration([1, 3], 8), **data)
            engine.set_train_micro_batch_size(3)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    engine.destroy()
    return said


def test_a_script_s_own_batches_have_this_rank_s_share(ranks: Ranks) -> None:
    """What suits one rank's share is refused on all of them: the others would wait."""
    (first, size), (second, _) = ranks.run(2, foreign_loader)
    assert first.startswith("initialize: failed on rank 1: ValueError: initialize: training_data gives batches of 2")
    assert "gives batches of 2 samples, and by heterogeneous.speeds this rank gets 6" in second
    assert "the replicas have unequal shares of a micro-batch (heterogeneous.speeds)" in size


def equal_batches(rank: int, stages: int) -> str:
    """What is said of batches that are as large on both replicas."""
    config = configuration([1, 2] * stages, 6, pipeline={"stages": stages})
    batch = torch.ones(3, WIDTH, dtype=torch.float64), torch.ones(3, WIDTH, dtype=torch.float64)
    engine = quiet_initialize(model=module() if stages > 1 else Whole(), config=config)
    try:
        engine.train_batch(itertools.repeat(batch))
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        engine.destroy()
    return "trained"


@pytest.mark.parametrize("stages", [1, 2])
def test_batches_that_are_as_large_on_unequal_ranks_are_refused(ranks: Ranks, stages: int) -> None:
    for said in ranks.run(2 * stages, equal_batches, stages):
        assert "the batches of the data-parallel ranks 0 and 1 have the same shapes" in said
        assert "by heterogeneous.speeds they are to have 2 and 4 samples: pass training_data to initialize" in said


def batch_sizes(rank: int, speeds: Any) -> int:
    engine = quiet_initialize(model=Whole(), config=configuration(speeds, 6), training_data=Points())
    x, _ = next(iter(engine.training_dataloader))
    engine.destroy()
    return len(x)


@alive("heterogeneous.speeds")
def test_speeds_divide_a_batch(ranks: Ranks) -> None:
    assert ranks.run(2, batch_sizes, None) == [3, 3]
    assert ranks.run(2, batch_sizes, [1, 2]) == [2, 4]
