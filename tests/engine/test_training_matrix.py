"""Everything that changes how the engine trains, crossed with everything else: the weights are the reference's."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import Small, batches, build
from pairwise import every_pair, pairs
from ranks import Ranks

from dsprof import engine as ds

STEPS: Final = 3
SCALE: Final = 256.0

SIZES: Final = {
    "large": {},
    "small": {
        "reduce_bucket_size": 1000, "allgather_bucket_size": 500, "stage3_prefetch_bucket_size": 2000,
        "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 3000,
        "stage3_max_reuse_distance": 1500, "sub_group_size": 700,
    },
    "each alone": {
        "reduce_bucket_size": 1, "allgather_bucket_size": 1, "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0,
        "sub_group_size": 1,
    },
}  # fmt: skip

PRECISIONS: Final[dict[str, tuple[torch.dtype, dict[str, Any], float, float]]] = {
    "fp32": (torch.float32, {}, 2e-5, 2e-5),
    # Three steps of at most 0.01 each, and weights up to 3: what is read has a precision of 2^-8 of that in bf16.
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}, 0.03, 0.03),
    "fp16": (torch.float16, {"fp16": {"enabled": True, "loss_scale": SCALE}}, 0.01, 0.03),
}
"""Name -> what the model runs in, the configuration, how far from the reference's weights may be, and how far FEW of
them.

Where the ranks' gradients cancel, what is left of their sum is rounding, as they are sent in fp16. Of that Adam's first
steps take the sign: of 0.121, 0.026 and -0.147 a weight goes 0.01 one way or the other.
"""
FEW: Final = 0.01
"""Of the elements of a tensor."""


class Case(NamedTuple):
    world_size: int
    stage: int
    overlap: bool
    sizes: str
    recompute: bool
    accumulate: int
    precision: str


VALUES: Final = ((1, 2, 3, 4), (0, 1, 2, 3), (True, False), tuple(SIZES), (True, False), (1, 2), tuple(PRECISIONS))


def name(case: Case) -> str:
    return "-".join(map(str, case))


CASES: Final = [
    Case(1, 0, True, "small", True, 2, "fp32"),
    Case(1, 1, True, "small", False, 1, "fp16"),
    Case(1, 2, False, "each alone", True, 1, "bf16"),
    Case(1, 3, False, "large", False, 1, "fp32"),
    Case(2, 0, True, "each alone", False, 1, "fp32"),
    Case(2, 1, False, "large", True, 2, "fp32"),
    Case(2, 2, True, "large", False, 2, "fp16"),
    Case(2, 3, True, "small", True, 2, "bf16"),
    Case(3, 0, False, "each alone", False, 1, "fp16"),
    Case(3, 1, False, "small", False, 2, "fp32"),
    Case(3, 2, True, "large", False, 1, "bf16"),
    Case(3, 3, True, "small", True, 1, "fp32"),
    Case(4, 0, True, "large", False, 2, "bf16"),
    Case(4, 1, False, "each alone", True, 2, "bf16"),
    Case(4, 2, False, "small", False, 2, "fp32"),
    Case(4, 3, True, "each alone", True, 1, "fp16"),
]
"""As few as can be: ranks and stages alone have 16 pairs."""


def test_every_pair_of_settings_is_in_a_case() -> None:
    assert every_pair(VALUES) - set().union(*map(pairs, CASES)) == set()


def configuration(case: Case) -> dict[str, Any]:
    chosen = {key: value for key, value in SIZES[case.sizes].items() if case.stage == 3 or not key.startswith("stage3")}
    if case.stage == 0:
        chosen = {key: value for key, value in chosen.items() if key == "reduce_bucket_size"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": case.stage, "overlap_comm": case.overlap, **chosen},
        **PRECISIONS[case.precision][1],
    }


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """The masters after training, whole."""
    model = build(recompute=case.recompute)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=configuration(case))
    for step in batches(STEPS, case.accumulate, dist.get_world_size()):
        for microbatch in step:
            engine.backward(engine(microbatch[rank]))
            engine.step()
    engine.zero.gatherer.gather([p for p in engine.zero.params if not p.resident], 10**9)
    found = {p.name: p.param.detach().float().clone() for p in engine.zero.params}
    engine.destroy()
    return found


@functools.cache
def reference(world_size: int, accumulate: int, precision: str) -> dict[str, torch.Tensor]:
    """One process with the model in the precision, and masters, gradients and AdamW in fp32 (DeepSpeed's rule)."""
    dtype = PRECISIONS[precision][0]
    scale = SCALE if dtype == torch.float16 else 1.0
    model: Small = build(dtype)
    masters = [torch.nn.Parameter(p.detach().float(), p.requires_grad) for p in model.parameters()]
    optimizer = torch.optim.AdamW([m for m in masters if m.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in batches(STEPS, accumulate, world_size):
        sums: list[torch.Tensor | None] = [None] * len(masters)
        for batch in step.flatten(0, 1):
            model.zero_grad()
            (model(batch) * scale).backward()
            for at, param in enumerate(model.parameters()):
                if param.grad is not None:
                    part = param.grad.float() / (scale * world_size * accumulate)
                    before = sums[at]
                    sums[at] = part if before is None else before + part
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad
        torch.nn.utils.clip_grad_norm_([m for m in masters if m.grad is not None], 0.5)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return {name: p.detach().float() for name, p in model.named_parameters()}


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(case.world_size, case.accumulate, case.precision)
    results = ranks.run(case.world_size, train, case)
    *_, usual, at_most = PRECISIONS[case.precision]
    for name, value in expected.items():
        difference = (results[0][name] - value).abs()
        assert difference.max().item() < at_most, name
        assert (difference >= usual).sum().item() <= FEW * value.numel(), name
        for other in results[1:]:
            assert torch.equal(results[0][name], other[name]), f"{name} differs between ranks"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_pairs_of_settings_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(*values) for values in itertools.product(*VALUES)], ids=name)
def test_all_settings_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)
