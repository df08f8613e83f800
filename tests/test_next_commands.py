"""What is said to type next is what `dsprof whatif` then answers, whatever was found first."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
from meshes import Call, MeshJob, Phase, Program, Work
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.study import study
from dsprof.knobs.questions import answer_questions, read_questions
from dsprof.reports import wording
from dsprof.trace import Trace

MIB = 1 << 20
SMALL = (2048, 4096, 512, 8192) * 20


def ddp(*sizes: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"fact": "ddp", "rank": rank, "number": 1, "site": "train.py:9", "gradient_bytes": list(sizes), **more}
        for rank in (0, 1)
    ]


def one_tensor(**more: Any) -> Trace:
    """64 MiB that nothing hides, over a network at 100 MB/s."""
    job = Job(buckets=(64 * MIB,), latency_ms=0.0, ms_per_mib=10.0, jitter=0.003, facts=ddp(64 * MIB, **more))
    trace = job.trace()
    for item, host in zip(trace.run.ranks, ("a", "b"), strict=True):
        item.host = host
    return trace


def one_bucket() -> Trace:
    """A single bucket of 32 tensors, all of which wait for the last."""
    job = Job(buckets=(64 * MIB,), latency_ms=0.1, ms_per_mib=0.8, jitter=0.003, facts=ddp(*[2 * MIB] * 32))
    return job.trace()


def with_metric() -> Trace:
    def program(rank: int, step: int) -> Program:
        late = 4.0 * ((step + rank) % 2)
        return (
            Phase("data", (Work(1),)),
            Phase("forward", (Work(20 + late),)),
            Phase("backward", (Work(30), Call("w", "all_reduce", MIB, "gradient"))),
            Phase("optimizer", (Work(6.0 - late),)),
            Work(0.2),
            Call("w", "all_reduce", 4),
        )

    lines = {("all_reduce", 4): "/home/me/train.py:40"}
    return MeshJob(2, {"w": ((0, 1), "")}, program, steps=40, latency_ms=3.0, lines=lines).trace()


@pytest.mark.parametrize(
    ("make", "code", "typed"),
    [
        (one_tensor, "comm.volume", "--set ddp.comm_hook=bf16"),
        (one_bucket, "comm.large-bucket", "--set ddp.bucket_cap_mb="),
        (Job(buckets=SMALL, latency_ms=4.0, facts=ddp(*SMALL)).trace, "comm.small-messages", "--set ddp.bucket_cap"),
        (with_metric, "comm.blocking", "--without comm.blocking"),
        (Job(forward=lambda rank, step: 90 if rank else 40).trace, "rank.straggler", "--without rank.straggler"),
    ],
    ids=["volume", "large bucket", "small messages", "blocking", "straggler"],
)
def test_whatif_answers_what_it_is_said_to(make: Callable[[], Trace], code: str, typed: str) -> None:
    trace = make()
    analysis = analyze(trace)
    assert analysis.problems[0].code == code
    command = next(line for line, _ in wording.next_commands(analysis, "RUN") if line.startswith("dsprof whatif"))
    assert command.startswith(f"dsprof whatif RUN {typed}")
    words = shlex.split(command)[3:]
    asked = {flag: [value for name, value in zip(words[::2], words[1::2], strict=True) if name == flag]
             for flag in ("--without", "--set")}  # fmt: skip
    rows = answer_questions(study(trace), read_questions(asked["--without"], [], asked["--set"], [], "RUN")).rows
    assert [row.reason for row in rows] == [""] * len(rows)
    assert rows[-1].gain is not None
    assert rows[-1].gain.ms == pytest.approx(analysis.problems[0].gain.ms, rel=0.05)


@pytest.mark.parametrize("framework", [{}, {"framework": "transformers"}], ids=["a script", "Trainer"])
def test_nothing_is_proposed_that_would_be_refused(framework: dict[str, str]) -> None:
    """Reduced inside of one host, where short numbers gain nothing: more micro-batches are no knob of a script, and
    what the Trainer's gains is not predicted."""
    job = Job(buckets=(64 * MIB,), latency_ms=0.0, jitter=0.003, facts=ddp(64 * MIB, **framework))
    analysis = analyze(job.trace())
    assert [one.code for one in analysis.problems] == ["comm.volume"]
    assert not [line for line, _ in wording.next_commands(analysis, "RUN") if "whatif" in line]
