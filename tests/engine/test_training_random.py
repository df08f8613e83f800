"""Random models under random configurations: whatever they are, the weights are those of a single process."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import engine_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsprof.engine.zero import Init

VOCABULARY = 11
STEPS = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
"""Of weights up to about 1. Half precisions have 8 and 11 bits, and sums of gradients are rounded in another order."""


@dataclass(frozen=True)
class Kind:
    """A model."""

    widths: tuple[int, ...]
    tied: bool
    """The head's weight is the embedding's, so the last width is the first one."""
    norms: bool
    biases: bool
    frozen: frozenset[int]
    """Layers that do not train."""
    frozen_embedding: bool
    unused: bool
    scalar: bool
    """A 0-d parameter, owned by the root."""
    empty: bool
    """A parameter without elements."""
    outside: bool
    """A layer that is never called: its weight and bias are used by the root."""
    twice: bool
    """The last layer of all is called twice."""
    recompute: bool
    branch: str
    """A layer that only some micro-batches go through: `never`, `microbatch` (on all ranks alike) or `rank`."""


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        widths = (*kind.widths, kind.widths[0]) if kind.tied else kind.widths
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, widths[0])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=kind.biases) for a, b in itertools.pairwise(widths))
        # With the usual eps the norm of two numbers is their sign, and rounding decides about it.
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=0.1) for width in widths[1:] if kind.norms)
        self.head = nn.Linear(widths[-1], VOCABULARY, bias=False)
        if kind.tied:
            self.head.weight = self.embedding.weight
        if kind.scalar:
            self.gain = nn.Parameter(torch.tensor(1.5))
        if kind.empty:
            self.nothing = nn.Parameter(torch.empty(0))
        if kind.unused:
            self.unused = nn.Linear(widths[0], 3)
        if kind.outside:
            self.mixer = nn.Linear(widths[-1], widths[-1])
        if kind.twice:
            self.again = nn.Linear(widths[-1], widths[-1])
        if kind.branch != "never":
            self.side = nn.Linear(widths[-1], widths[-1])
        for number in kind.frozen:
            if number < len(self.layers):
                self.layers[number].requires_grad_(False)
        if kind.frozen_embedding:
            self.embedding.requires_grad_(False)

    def layer(self, number: int, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[number](x))
        return self.norms[number](x) if self.kind.norms else x

    def forward(self, ids: Tensor, turn: int) -> Tensor:
        """`turn` decides about the branch."""
        x = self.embedding(ids)
        for number in range(len(self.layers)):
            if not self.kind.recompute:
                x = self.layer(number, x)
                continue
            x = checkpoint(self.layer, number, x, use_reentrant=False)
        if self.kind.twice:
            x = self.again(torch.tanh(self.again(x)))
        if self.kind.outside:
            x = x + F.linear(x, self.mixer.weight, self.mixer.bias)
        if self.kind.branch != "never" and turn % 2:
            x = x + self.side(x)
        if self.kind.scalar:
            x = x * self.gain
        if self.kind.empty:
            x = x + self.nothing.sum()
        logits = self.head(x)
        return F.cross_entropy((logits.float() if logits.dtype.itemsize < 4 else logits).flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Case:
    """A training."""

    kind: Kind
    dtype: torch.dtype
    world_size: int
    accumulate: int
    clip: float
    early: bool
    """Made under zero.Init."""
    zero: dict[str, Any]

    def turn(self, microbatch: int, rank: int) -> int:
        return microbatch + (rank if self.kind.branch == "rank" else 0)

    def data(self) -> Tensor:
        """Token ids [steps, accumulate, ranks, batch, length]."""
        generator = torch.Generator().manual_seed(5)
        return torch.randint(0, VOCABULARY, (STEPS, self.accumulate, self.world_size, 2, 3), generator=generator)

    def config(self) -> dict[str, Any]:
        bf16, fp16 = {"enabled": True}, {"enabled": True, "loss_scale": 64}
        precision = {torch.bfloat16: {"bf16": bf16}, torch.float16: {"fp16": fp16}}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}},
            "zero_optimization": self.zero,
            **precision.get(self.dtype, {}),
        }


SIZES = st.sampled_from([0, 1, 40, 150, 10**9])
WIDTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype]) -> Case:
    stage = draw(st.integers(0, 3))
    flag = st.booleans()
    zero = {
        "stage": stage,
        "reduce_bucket_size": 1 + draw(SIZES),
        "overlap_comm": draw(flag),
        "contiguous_gradients": draw(flag),
    }
    if stage:
        zero |= {key: draw(flag) for key in ("reduce_scatter", "round_robin_gradients", "allgather_partitions")}
        zero |= {key: draw(SIZES) for key in ("allgather_bucket_size", "sub_group_size")}
    world_size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    if stage == 3:
        zero |= {
            f"stage3_{key}": draw(SIZES)
            for key in (
                "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
                "max_live_parameters", "max_reuse_distance",
            )
        }  # fmt: skip
        zero["zero_hpz_partition_size"] = draw(st.sampled_from([1, 2])) if world_size % 2 == 0 else 1
    kind = Kind(
        widths=draw(WIDTHS), tied=draw(flag), norms=draw(flag), biases=draw(flag),
        frozen=draw(st.frozensets(st.integers(0, 3), max_size=2)), frozen_embedding=draw(flag), unused=draw(flag),
        scalar=draw(flag), empty=draw(flag), outside=draw(flag), twice=draw(flag), recompute=draw(flag),
        # In stage 3 all ranks have to run the same modules.
        branch=draw(st.sampled_from(["never", "microbatch"] if stage == 3 else ["never", "microbatch", "rank"])),
    )  # fmt: skip
    return Case(
        kind, draw(st.sampled_from(dtypes)), world_size, draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 0.3])),
        stage == 3 and draw(flag), zero,
    )  # fmt: skip


def build(case: Case, early: bool = False) -> Model:
    torch.manual_seed(2)
    with Init(dtype=case.dtype) if early else contextlib.nullcontext():
        model = Model(case.kind)
    return model if early else model.to(case.dtype)


def reference(case: Case) -> dict[str, Tensor]:
    """The weights after training in one process, in fp32 where the model is in a half precision."""
    model = build(case)
    params = dict(model.named_parameters())
    masters = {
        name: nn.Parameter(param.detach().to(torch.promote_types(case.dtype, torch.float32)), param.requires_grad)
        for name, param in params.items()
    }
    trained = [master for master in masters.values() if master.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9, weight_decay=0.01) if trained else None
    for step in case.data():
        for master in trained:
            master.grad = None
        for microbatch, of_ranks in enumerate(step):
            for rank, ids in enumerate(of_ranks):
                model.zero_grad()
                (model(ids, case.turn(microbatch, rank)) / (case.accumulate * case.world_size)).backward()
                for name, param in params.items():
                    if param.grad is not None:
                        grad, master = param.grad.to(masters[name].dtype), masters[name]
                        master.grad = grad if master.grad is None else master.grad + grad
        if case.clip:
            torch.nn.utils.clip_grad_norm_(trained, case.clip)
        if optimizer is not None:
            optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def train(rank: int, case: Case) -> dict[str, Tensor]:
    """The weights after training."""
    model = build(case, case.early)
    with engine_for(model, case.config()) as engine:
        for step in case.data():
            for microbatch, of_ranks in enumerate(step):
                engine.backward(engine(of_ranks[rank], case.turn(microbatch, rank)))
                engine.step()
        zero = engine.zero
        zero.gatherer.gather([param for param in zero.params if not param.resident], 10**9)
        return {param.name: param.param.detach().clone() for param in zero.params}


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(case)
    for found in ranks.run(case.world_size, train, case):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == case.dtype
            assert value.numel() == 0 or (found[name].to(value.dtype) - value).abs().max() < TOLERANCE[case.dtype], name


def few(examples: int) -> settings:
    """The same ones in each run."""
    return settings(
        derandomize=True, deadline=None, database=None, max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip


@few(10)
@given(case=cases([torch.float64, torch.float32]))
def test_any_model_trains_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@few(7)
@given(case=cases([torch.bfloat16, torch.float16]))
def test_any_model_in_half_precision_trains_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@few(200)
@given(case=cases([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_many_models_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)
