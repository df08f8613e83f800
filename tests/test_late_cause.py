"""Why a rank is late: each cause that was measured, on made-up records; and that no cause is named which was not."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from synthetic import Job, PerStep

from dsprof import gauges
from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.run.cause import Late
from dsprof.analyzer.rules.run.late_cause import quota, stopped


def late(measured: dict[str, PerStep], *facts: dict[str, Any], **changes: Any) -> Finding:
    """Rank 1 of three takes 50 ms longer in forward."""
    job = Job(ranks=3, steps=24, forward=lambda rank, step: 90.0 if rank == 1 else 40.0, gauges=measured,
              facts=list(facts), **changes)  # fmt: skip
    found = next(one for one in analyze(job.trace()).findings if one.code == "rank.straggler")
    assert found.where.ranks == (1,)
    return found


def cause(finding: Finding) -> str:
    (found,) = [str(item.value) for item in finding.evidence if item.metric == "cause"]
    return found


def on(slow: float, others: float = 0.0) -> PerStep:
    return lambda rank, step: slow if rank == 1 else others


@pytest.mark.parametrize(
    ("measured", "name", "words", "fix"),
    [
        ({gauges.THROTTLED: on(48.0)}, "cpu-quota", "the CPU quota of its container stops it for 48.0 ms a step",
         "raise the CPU limit of the container of rank 1: resources.limits.cpu in Kubernetes"),
        ({gauges.STOPPED: on(55.0, 1.0)}, "process-stopped", "its whole process is stopped for 55.0 ms of each step",
         "raise or remove the CPU limit of the container of rank 1"),
        ({gauges.PYTHON_THREAD + "prefetch": on(60.0), gauges.PYTHON_THREAD + "logger": on(0.1)},
         "python-thread, probably",
         "its Python thread 'prefetch' computes 60.0 ms a step, for which it holds the interpreter's lock",
         "have what the thread 'prefetch' of rank 1 does done by a process of its own, or less often"),
        ({gauges.MEMORY_STALL: on(40.0), gauges.MAJOR_FAULTS: on(5e6)}, "paging",
         "its memory does not suffice: 5,000 pages a step are read back from a disk", "give rank 1 more memory"),
        ({gauges.MAJOR_FAULTS: on(5e6)}, "paging, probably", "its memory does not suffice", "give rank 1 more memory"),
        ({gauges.READ: on(64e9, 0.0)}, "disk, probably", "it reads 61.0 MiB a step from a disk",
         "look at the disk of rank 1"),
    ],
)  # fmt: skip
def test_what_was_measured_is_the_cause(measured: dict[str, PerStep], name: str, words: str, fix: str) -> None:
    found = late(measured, cpu_share=0.1)
    assert cause(found) == name
    assert words in found.title
    assert found.fixes[0].title.startswith(fix)
    if "probably" not in name:
        assert not any(one.title.startswith("look for what only") for one in found.fixes)


def test_the_limit_is_told() -> None:
    found = late({gauges.THROTTLED: on(48.0)}, {"fact": "cpu_limit", "rank": 1, "cores": 0.6, "cgroup": "/c"},
                 {"fact": "cpu_limit", "rank": 0, "cores": 4, "cgroup": "/d"})  # fmt: skip
    assert "the CPU quota of its container (0.6 cores) stops it" in found.title


def test_fewer_cores_than_the_others() -> None:
    crowded = {"core_wait_seconds ": on(0.0)}  # of another name
    job = {"cpus": lambda rank: [0] if rank == 1 else [1, 2, 3, 4], "core_wait": 0.4}
    found = late(crowded, **job)
    assert cause(found).startswith("not known")  # all wait in proportion to what they do, rank 1 too little longer


def test_a_thread_of_its_own_that_has_its_core() -> None:
    """Where cores are few, the training thread waits for one while another of its process computes."""
    found = late({gauges.PYTHON_THREAD + "prefetch": on(22.0)}, core_wait=0.8)  # of 40 ms without a core
    assert cause(found) == "python-thread, probably"
    assert any(item.metric == "ready to run without a core, more than peers" for item in found.evidence)
    assert cause(late({gauges.PYTHON_THREAD + "prefetch": on(5.0)}, core_wait=0.8)) == "no-core, probably"


CROWDED: Final = on(42.0, 1.0)
NO_QUOTA: Final = {gauges.THROTTLED: on(0.0)}
ALL_SEEN: Final[dict[str, Any]] = {"fact": "cpu_cgroups", "rank": 1, "whole": True}
"""All cgroups above rank 1, and so all quotas."""


def test_something_else_has_its_core() -> None:
    found = late(NO_QUOTA, ALL_SEEN, cpu_share=0.4, crowded=CROWDED, cpus=lambda rank: [2 * rank, 2 * rank + 1])
    assert cause(found) == "no-core"
    assert found.title.endswith(": it waits 41.0 ms a step for a core")
    (fix,) = found.fixes
    assert fix.title.startswith("something else runs on the cores of rank 1")


def test_cores_that_all_ranks_share_are_no_reason_for_one_to_be_late() -> None:
    """It wants one more often, as where its threads hand a lock to one another: what runs there hinders all alike."""
    found = late(NO_QUOTA, ALL_SEEN, cpu_share=0.4, crowded=CROWDED, cpus=lambda rank: [0, 1])
    assert cause(found) == "no-core, probably"
    assert "waits 41.0 ms a step for a core, of those that the others use, too" in found.title


@pytest.mark.parametrize(
    ("measured", "facts"),
    [({}, [ALL_SEEN]), (NO_QUOTA, []), (NO_QUOTA, [ALL_SEEN | {"whole": False}]), (NO_QUOTA, [ALL_SEEN | {"rank": 0}])],
)
def test_a_quota_that_cannot_be_read_may_be_what_it_waits_for(
    measured: dict[str, PerStep], facts: list[dict[str, Any]]
) -> None:
    """Where the kernel counts the time for which a quota stops a thread as one without a core: that of the rank's own
    cgroup, or of one above its container, which is not seen from inside."""
    found = late(measured, *facts, cpu_share=0.4, crowded=CROWDED, cpus=lambda rank: [rank])
    assert cause(found) == "no-core, probably"
    assert any("or raise the CPU limit of the container of rank 1, or of a group above" in fix.title
               for fix in found.fixes)  # fmt: skip


def test_a_rank_that_computes_more_on_cores_as_crowded_as_the_others() -> None:
    """Each waits 0.8 ms for a ms of its work: that rank 1 waits longer follows from its having more to do."""
    found = late(NO_QUOTA, core_wait=0.8)
    assert cause(found) == "no-core, probably"
    assert "as much for what it computes as the others do" in found.title
    assert any(fix.title == "or look for what rank 1 does more than the others" for fix in found.fixes)


@pytest.mark.parametrize(
    ("measured", "name"),
    [({gauges.MAJOR_FAULTS: on(5e6)}, "paging, probably"), ({gauges.READ: on(64e9)}, "disk, probably")],
)
def test_on_a_crowded_machine_what_only_this_rank_has_comes_first(measured: dict[str, PerStep], name: str) -> None:
    """Whose step is longer for another reason waits longer for cores, too, where all ranks do."""
    assert cause(late({**NO_QUOTA, **measured}, core_wait=0.8, cpu_share=0.4)) == name


@pytest.mark.parametrize("told", [True, False])
def test_bound_to_fewer_cores(told: bool) -> None:
    found = late(NO_QUOTA if told else {}, ALL_SEEN, cpu_share=0.4, crowded=CROWDED,
                 cpus=lambda rank: [0] if rank == 1 else [1, 2, 3, 4])  # fmt: skip
    assert cause(found) == ("affinity" if told else "affinity, probably")


@pytest.mark.parametrize(
    "measured",
    [
        {gauges.THROTTLED: on(48.0, 48.0)},  # all are: it is not what makes rank 1 late
        {gauges.STOPPED: on(10.0)},  # too little
        {gauges.PYTHON_THREAD + "prefetch": on(60.0, 55.0)},
        {gauges.MAJOR_FAULTS: on(5e4)},
        {},
    ],
)
def test_what_does_not_explain_it_is_not_the_cause(measured: dict[str, PerStep]) -> None:
    found = late(measured)
    assert cause(found).startswith("not known")
    assert found.fixes[0].title.startswith("look for what only rank 1 does in forward")


@pytest.mark.parametrize(
    ("cpu_share", "words"),
    [(0.95, "it computes 47.5 ms a step longer than the others"), (0.1, "it neither computes more nor lacks a core")],
)
def test_of_an_unknown_cause_it_is_said_whether_the_rank_computes(cpu_share: float, words: str) -> None:
    found = late({}, cpu_share=cpu_share, jitter=0.0)
    assert words in cause(found)


def test_the_page_of_findings_has_every_cause() -> None:
    root = Path(__file__).parents[1]
    code = "".join(path.read_text() for path in (root / "dsprof" / "analyzer" / "rules" / "run").glob("*.py"))
    names = set(re.findall(r'\bCause\(\s*"([a-z-]+)"', code))
    assert {"cpu-quota", "no-core", "affinity", "numa"} <= names
    page = (root / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = "\n".join(re.findall(r"^\| .*", page.partition("| `cause` |")[2], re.MULTILINE))
    assert {name for name in names if f"`{name}" not in rows} == set()


def test_what_stops_ranks_is_compared_as_a_share_of_their_time() -> None:
    """Ranks that step without waiting for each other: one's steps are twice as long, and a quota stops all alike."""
    spent, wall = np.array([[30.0], [60.0], [30.0]]), np.array([[50.0], [100.0], [50.0]])
    study: Any = SimpleNamespace(
        gauges=SimpleNamespace(spent=lambda name: spent, wall_ms=wall), facts={}, ranks_where=lambda which: [1]
    )
    slow = np.array([False, True, False])
    assert quota(Late(study, slow, 50.0)) is None
    spent[1] = 99.0
    found = quota(Late(study, slow, 50.0))
    assert found is not None
    assert (found.evidence[0].value, found.evidence[0].expected) == (99.0, 60.0)
    held = stopped(Late(study, slow, 50.0))
    assert held is not None
    assert "(99 % of the time)" in held.words


@pytest.mark.parametrize("name", ["core_wait_seconds", gauges.MEMORY_STALL, f"{gauges.PYTHON_THREAD}logs"])
def test_what_is_taken_of_all_ranks_alike_is_beyond_none(name: str) -> None:
    study: Any = SimpleNamespace(
        gauges=SimpleNamespace(spent=lambda _: np.array([[30.0], [60.0]]), wall_ms=np.array([[50.0], [100.0]]))
    )
    late = Late(study, np.array([False, True]), 50.0)
    assert late.beyond(name) == pytest.approx(0.0)
    assert late.beyond("training_thread_cpu_seconds") == 30.0, "it computes longer"
