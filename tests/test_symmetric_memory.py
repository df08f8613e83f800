"""A job that communicates through symmetric memory: it is known, at no cost for each call, and not judged."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed._symmetric_memory as symm_mem
from armed import train
from synthetic import Job
from torch._C import _distributed_c10d as c10d

from dsprof.analyzer import analyze
from dsprof.analyzer.rules.registry import all_rules
from dsprof.collectors.communication import symmetric_memory
from dsprof.collectors.hooking import statements

STATED = {"fact": "symmetric_memory"}


class StandIn:
    """torch's, where there is a device for it."""

    calls: list[tuple[Any, ...]]

    @staticmethod
    def rendezvous(tensor: Any, group_name: str | None = None) -> str:
        StandIn.calls.append((tensor, group_name))
        return "handle"

    @staticmethod
    def empty_strided_p2p(*of: Any) -> str:
        StandIn.calls.append(of)
        return "tensor"


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    StandIn.calls = []
    monkeypatch.setattr(c10d, "_SymmetricMemory", StandIn)
    monkeypatch.setattr(symm_mem, "_SymmetricMemory", StandIn)
    statements.send_to(found.append)
    found.clear()  # what other tests have stated
    yield found
    statements.send_to(None)


USES: dict[str, Callable[[], Any]] = {
    "rendezvous": lambda: symm_mem.rendezvous("tensor", "group"),  # type: ignore[arg-type]
    "workspace": lambda: symm_mem._SymmetricMemory.rendezvous("tensor"),  # type: ignore[arg-type]
    "memory": lambda: c10d._SymmetricMemory.empty_strided_p2p((8,), [1], "float32"),  # type: ignore[call-arg,arg-type]
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_first_use_is_stated_and_nothing_is_done_for_the_others(
    stated: list[dict[str, Any]], use: Callable[[], Any]
) -> None:
    plain = dict(vars(StandIn))
    (uninstall,) = symmetric_memory.watch()
    assert stated == []
    assert use() in ("handle", "tensor")
    assert stated == [STATED]
    assert {name: vars(StandIn)[name] for name in symmetric_memory.ENTRIES} == {
        name: plain[name] for name in symmetric_memory.ENTRIES
    }
    use()
    assert len(StandIn.calls) == 2
    assert stated == [STATED]
    uninstall()


def test_where_it_is_not_used_nothing_is_left_of_the_hooks(stated: list[dict[str, Any]]) -> None:
    plain = dict(vars(StandIn))
    (uninstall,) = symmetric_memory.watch()
    assert vars(StandIn)["rendezvous"] is not plain["rendezvous"]
    uninstall()
    assert dict(vars(StandIn)) == plain
    assert stated == []


def test_buffers_that_collectives_move_are_seen(stated: list[dict[str, Any]]) -> None:
    """FSDP2's, with set_symm_mem_for_comm or the like: all_gather and reduce_scatter are NCCL's all the same."""
    fsdp = types.ModuleType("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    exec("def gather(symm_mem): return symm_mem.rendezvous('tensor', 'group')", vars(fsdp))
    (uninstall,) = symmetric_memory.watch()
    assert fsdp.gather(symm_mem) == "handle"
    assert stated == []
    symm_mem.rendezvous("tensor", "group")  # type: ignore[arg-type]
    assert stated == [STATED]
    uninstall()


def test_an_error_of_torch_is_the_jobs(stated: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("no symmetric memory here")

    monkeypatch.setattr(StandIn, "rendezvous", staticmethod(refuses))
    (uninstall,) = symmetric_memory.watch()
    with pytest.raises(RuntimeError, match="no symmetric memory here"):
        symm_mem.rendezvous("tensor", "group")  # type: ignore[arg-type]
    uninstall()


def test_communication_is_then_not_judged() -> None:
    of = {code for code in (rule.code for rule in all_rules()) if code.startswith("comm.")}
    of.add("pipeline.stall")  # of messages between stages
    plain = analyze(Job(steps=12).trace())
    assert not of & {*plain.not_judged}
    hidden = analyze(Job(steps=12, facts=[STATED]).trace())
    assert {*hidden.not_judged} - {*plain.not_judged} == of
    assert all("ranks communicate through symmetric memory" in hidden.not_judged[code] for code in of)


JOB = """
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    try:
        symm_mem.rendezvous(torch.ones(2), dist.group.WORLD)
    except RuntimeError:
        print("refused")
"""


def test_torchs_own(tmp_path: Path) -> None:
    """It refuses a tensor on the CPU, with a hook and without."""
    done = train(tmp_path, JOB, native="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\nrefused\n", "")
    (facts,) = tmp_path.glob("run/capture/*/facts.jsonl")
    told = [json.loads(line) for line in facts.read_text().splitlines()]
    assert [fact for fact in told if fact["fact"] == "symmetric_memory"] == [{**STATED, "rank": 0}]
