"""FSDP2: what it does for its units becomes rows, and how it is set up a fact; gradients stay what they are."""

from __future__ import annotations

from pathlib import Path

import torch
from armed import ALONE, both, captured, inside, train

from dsprof.collectors.communication.sharding import Sharded
from dsprof.schema import SHARDING, Kind

TRAIN = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
torch.manual_seed(0)
{alone}
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
for layer in model[:2]:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
dist.destroy_process_group()
"""


@both
def test_each_unit_is_seen_before_and_after_its_forward_and_its_backward(native: str, tmp_path: Path) -> None:
    done = train(tmp_path, TRAIN.format(alone=ALONE), native=native)
    assert done.returncode == 0, done.stderr
    found = captured(tmp_path)
    work = [row for row in found.rows if row.kind is Kind.MODULE]
    assert {row.name for row in work} == {SHARDING}
    assert all(row.end_ns >= row.start_ns > 0 for row in work)
    last_forward, last_backward = found.phases("forward")[-1], found.phases("backward")[-1]
    before_and_after = [inside(row, last_forward) for row in work].count(True)
    assert before_and_after == 6
    assert [inside(row, last_backward) for row in work].count(True) >= 6
    (fact,) = (fact for fact in found.facts if fact["fact"] == "fsdp")
    assert (fact["version"], fact["units"], fact["parameters"]) == (2, 3, 6)
    assert (fact["reshard_after_forward"], fact["param_dtype"], fact["reduce_dtype"]) == (True, None, "bfloat16")
    assert (len(fact["of_units"]), fact["root"]) == (3, True)
    assert (
        sum(size for size, _ in fact["of_units"]) == sum(trained for _, trained in fact["of_units"]) == fact["gathered"]
    )
    lines = [int(site.rpartition(":")[2]) for site in fact["sites"]]
    assert [TRAIN.splitlines()[line - 1].strip() for line in lines] == [
        "fully_shard(layer, mp_policy=policy)", "fully_shard(model, mp_policy=policy)",
    ]  # fmt: skip


@both
def test_losses_are_those_without_a_capture(native: str, tmp_path: Path) -> None:
    code = TRAIN.format(alone=ALONE)
    armed = train(tmp_path, code, native=native)
    plain = train(tmp_path, code, native=native, DSPROF="0")
    assert armed.stdout == plain.stdout != ""


def test_a_last_unit_that_holds_no_other_is_not_the_models() -> None:
    """As of a model without parameters of its own, for which torch makes no unit."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    sharded, roots = Sharded(2), []
    for module in (*layers, layers):
        sharded.add((module,), 2, 24, 24, 24)
        roots.append(sharded.root)
    assert roots == [True, False, True]
