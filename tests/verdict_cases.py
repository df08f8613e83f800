"""Jobs whose truth is known, by family.

A family is a function that draws a job and knows its truth. With nothing to draw from it is the family's usual job,
short enough for `make test`; else magnitude, place and number of ranks are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from verdict_truth import (
    Job,
    Outcome,
    first_fix_says,
    gains,
    gains_in_all,
    is_present,
    line_of,
    share,
    spends,
    step_is,
    verdict_is,
)  # fmt: skip

Choice = TypeVar("Choice")

# --- drawing ---------------------------------------------------------------------------------------


class Draw:
    """Takes the usual value of each thing, or draws another one."""

    def __init__(self, source: random.Random | None = None) -> None:
        self.source = source
        self.seed = 0 if source is None else source.randrange(1000)

    def between(self, usual: float, low: float, high: float) -> float:
        return usual if self.source is None else round(self.source.uniform(low, high), 2)

    def one(self, usual: Choice, *others: Choice) -> Choice:
        return usual if self.source is None else self.source.choice((usual, *others))

    def place(self, usual: int, count: int) -> int:
        """One of `count` ranks or stages."""
        return usual if self.source is None else self.source.randrange(count)


def words(draw: Draw, **switches: Any) -> tuple[str, ...]:
    """`--name value` of each; a switch for True, nothing for False."""
    said = ["--seed", str(draw.seed)]
    for name, value in switches.items():
        flag = "--" + name.replace("_", "-")
        said += [flag] if value is True else [] if value is False else [flag, str(value)]
    return tuple(said)


# --- the families ----------------------------------------------------------------------------------


def uneven_pipeline(draw: Draw) -> Job:
    stages, micro_batches = draw.one(4, 3), draw.one(16, 12, 20)
    slow_by, slow = draw.between(2.2, 1.7, 3.0), draw.place(2, stages)
    args = words(
        draw, schedule=draw.one("1F1B", "GPipe"), micro_batches=micro_batches, slow_stage=slow, slow_by=slow_by,
        forward_ms=2,
    )  # fmt: skip

    def above_mean_ms(outcome: Outcome) -> float:
        """What the slow stage would be rid of if all had the same work; a layer moved as a whole leaves some."""
        each = [outcome.spent_ms(stage, "compute") for stage in range(stages)]
        return each[slow] - sum(each) / stages

    return Job(
        "pipeline.py", args, stages, 36, "pipeline.imbalance", {"stage": slow}, ("pipeline.bubble",),
        (gains_in_all(above_mean_ms, 0.6, 1.3),),
    )  # fmt: skip


def short_pipeline(draw: Draw) -> Job:
    stages = draw.one(4, 3)
    args = words(
        draw, schedule=draw.one("1F1B", "GPipe"), micro_batches=stages + draw.place(0, 2),
        forward_ms=draw.between(8.0, 6.0, 9.0),
    )  # fmt: skip
    return Job("pipeline.py", args, stages, 40, "pipeline.bubble")


def slow_edge(draw: Draw) -> Job:
    """What one stage sends to the next goes over a link that the kernel paces."""
    stages, micro_batches = draw.one(3, 4), draw.one(12, 8, 16)
    source, link = draw.place(1, stages - 1), draw.between(10.0, 6.0, 14.0)
    args = words(
        draw, schedule=draw.one("1F1B", "GPipe"), micro_batches=micro_batches, rows=2048, slow_edge=source, link=link,
        forward_ms=4,
    )  # fmt: skip

    def under_way_ms(outcome: Outcome) -> float:
        return micro_batches * 2048 * 32 * 4 / link / 1e3

    # A part of it hides behind the computation; and some of each message goes out at once.
    return Job(
        "pipeline.py", args, stages, 30, "pipeline.stall", {"ranks": [source, source + 1], "stage": source + 1},
        ("pipeline.bubble",), (gains_in_all(under_way_ms, 0.35, 1.1),),
    )  # fmt: skip


def many_units(draw: Draw) -> Job:
    args = words(draw, layers=draw.one(60, 40, 50, 70), width=draw.one(32, 16, 64))
    also = ("comm.exposed", "comm.redundant-gather")
    return Job("fsdp.py", args, draw.one(2, 3), 36, "comm.small-messages", also=also)


def checkpoints(draw: Draw) -> Job:
    every, megabytes = draw.one(4, 3, 5), draw.one(160, 80, 120, 200)
    speed, saves = draw.one(1000, 500, 800), draw.one("rank 0", "all ranks")
    ranks = draw.one(2, 3)
    args = words(draw, every=every, megabytes=megabytes, megabytes_per_s=speed, saves=saves)
    spent_s = (48 // every) * megabytes / speed * (1 if saves == "rank 0" else ranks)
    return Job("checkpoint.py", args, ranks, 48, "checkpoint.stall", checks=(spends("checkpointing", spent_s),))


def lone_evaluation(draw: Draw) -> Job:
    every, batches = draw.one(2, 3, 4), draw.one(6, 8, 10)
    args = words(draw, every=every, batches=batches, forward_ms=14)
    check = spends("evaluation", (80 // every) * batches * 0.014)
    return Job("evaluation.py", args, draw.one(2, 3, 4), 80, "eval.uneven", {"ranks": [0]}, checks=(check,))


def nanogpt(draw: Draw) -> Job:
    every, batches, micro_steps = draw.one(10, 8, 12), draw.one(20, 15, 30), draw.one(2, 1, 3)
    args = words(draw, eval_interval=every, eval_iters=batches, micro_steps=micro_steps, forward_ms=8)
    check = spends("evaluation", math.ceil(60 / every) * batches * 0.008)
    return Job("nanogpt.py", args, draw.one(2, 3), 60, "eval.uneven", {"ranks": [0]}, checks=(check,))


def late_loader(draw: Draw) -> Job:
    ranks = draw.one(2, 3, 4)
    late = draw.place(0, ranks)
    args = words(draw, batch_norm=True, late_rank=late, late_ms=draw.between(40, 25, 60))
    check = gains("data.stall", lambda outcome: outcome.spent_ms(late, "data"), 0.25)
    return Job("ddp.py", args, ranks, 60, "data.stall", {"ranks": [late]}, checks=(check,))


def straggler_and_stop(draw: Draw) -> Job:
    ranks = draw.one(2, 3, 4)
    slow, stops = draw.place(1, ranks), draw.place(1, ranks)
    args = words(
        draw, slow_rank=slow, slow_by=draw.between(1.3, 1.2, 1.6), stop_rank=stops, stop_step=draw.one(33, 21, 47),
        stop_s=draw.between(3, 2, 6), stop_in=draw.one("loop", "forward"),
    )  # fmt: skip

    def late_ms(outcome: Outcome) -> float:
        others = [outcome.spent_ms(rank, "compute") for rank in range(ranks) if rank != slow]
        return outcome.spent_ms(slow, "compute") - max(others)

    return Job(
        "ddp.py", args, ranks, 60, "rank.straggler", {"ranks": [slow]}, ("pause.stop",),
        (gains("rank.straggler", late_ms, 0.25), is_present("pause.stop", ranks=[stops])),
    )  # fmt: skip


def workers_anew(draw: Draw) -> Job:
    args = words(draw, epoch=draw.one(10, 8), open_ms=draw.between(400, 300, 800), workers=draw.one(1, 2))
    check = first_fix_says("persistent_workers=True")
    return Job("workers.py", args, 2, 80, "data.stall", checks=(check,))


def ring(draw: Draw) -> Job:
    ranks = draw.one(3, 4)
    slow = draw.place(1, ranks)
    args = words(draw, layers=draw.one(2, 1, 3), slow_rank=slow, slow_by=draw.between(1.6, 1.4, 2.0))

    def late_ms(outcome: Outcome) -> float:
        others = [outcome.spent_ms(rank, "compute") for rank in range(ranks) if rank != slow]
        return outcome.spent_ms(slow, "compute") - max(others)

    check = gains("rank.straggler", late_ms, 0.35)
    return Job("ring.py", args, ranks, 60, "rank.straggler", {"ranks": [slow]}, checks=(check,))


def lbfgs(draw: Draw) -> Job:
    # Long beside LBFGS's own arithmetic, of which a slow host makes 3 ms an evaluation.
    args = words(draw, optimizer="LBFGS", max_iter=draw.one(4, 3, 6), forward_ms=draw.between(12, 8, 16))
    checks = (share("compute", 0.8), share("optimizer", 0.0, 0.15), verdict_is("healthy"))
    return Job("closure.py", args, None, 45, None, checks=checks)


def adam_closure(draw: Draw) -> Job:
    ddp = draw.one(False, True)
    args = words(draw, optimizer="Adam", forward_ms=draw.between(8, 6, 12), ddp=ddp)
    checks = (share("compute", 0.75), share("optimizer", 0.0, 0.15))
    return Job("closure.py", args, 2 if ddp else None, 60, None, checks=checks)


def two_loaders(draw: Draw) -> Job:
    # One worker: a second one is within the cores of any host.
    workers = 1
    args = words(
        draw, workers=workers, test_workers=draw.one(0, 1, 2), read_ms=draw.between(6, 5, 10),
        forward_ms=draw.between(5, 4, 8),
    )  # fmt: skip
    at = line_of("mnist.py", "train_loader = DataLoader(")

    def names_it(outcome: Outcome) -> Iterator[str]:
        patches = [patch for fix in outcome.first.get("fixes", []) for patch in fix["patch"]]
        places = {f"{Path(patch['file']).name}:{patch['line']}" for patch in patches if patch.get("file")}
        if places != {at}:
            yield f"the fixes are for {places}, the training loader is at {at}"
        now = [item["value"] for item in outcome.first.get("evidence", []) if "workers" in item["metric"]]
        if workers not in now:
            yield f"workers: {now}, true are {workers}"

    return Job("mnist.py", args, None, 70, "data.stall", checks=(names_it,))


def by_hand(draw: Draw) -> Job:
    ddp = draw.one(False, True)
    args = words(draw, forward_ms=draw.between(10, 8, 16), ddp=ddp)
    checks = (share("compute", 0.8), step_is("backward"))
    return Job("manual_sgd.py", args, 2 if ddp else None, 60, None, checks=checks)


def gan(draw: Draw) -> Job:
    ddp = draw.one(False, True)
    args = words(draw, critic_steps=1, forward_ms=draw.between(4, 3, 6), ddp=ddp)
    return Job("gan.py", args, 2 if ddp else None, 50, None, checks=(share("compute", 0.7), step_is("optimizer")))


def many_critic_steps(draw: Draw) -> Job:
    ddp = draw.one(False, True)
    args = words(draw, critic_steps=draw.one(5, 3, 4, 6), forward_ms=draw.between(2, 1.5, 3), ddp=ddp)
    return Job("gan.py", args, 2 if ddp else None, 45, None, checks=(share("compute", 0.7), step_is("optimizer")))


def actor_critic(draw: Draw) -> Job:
    forward_ms = draw.between(1.0, 0.8, 1.5)
    args = words(draw, episode=draw.one(12, 8, 16), forward_ms=forward_ms, world_ms=round(3 * forward_ms, 2))

    def says_where(outcome: Outcome) -> Iterator[str]:
        verdict = outcome.found["verdict"]
        if verdict["status"] == "healthy" or "forward" not in verdict["headline"]:
            yield f"verdict: {verdict}"

    return Job("actor_critic.py", args, None, 45, None, checks=(share("other", 0.3), says_where), explained=False)


def experts(draw: Draw) -> Job:
    hot = draw.place(1, 2)
    args = words(draw, layers=draw.one(2, 1, 3), hot_rank=hot, share=draw.between(0.7, 0.65, 0.75))

    def late_ms(outcome: Outcome) -> float:
        return (outcome.spent_ms(hot, "expert") - outcome.spent_ms(1 - hot, "expert")) / 2

    checks = gains("moe.imbalance", late_ms, 0.35), first_fix_says("balancing loss")
    return Job("experts.py", args, 2, 60, "moe.imbalance", {"ranks": [hot]}, checks=checks)


FAMILIES: Final[dict[str, Callable[[Draw], Job]]] = {
    "uneven pipeline": uneven_pipeline,
    "pipeline with few micro-batches": short_pipeline,
    "slow link between stages": slow_edge,
    "FSDP2 with many units": many_units,
    "checkpoints": checkpoints,
    "evaluation on rank 0": lone_evaluation,
    "nanoGPT": nanogpt,
    "late loader and BatchNorm": late_loader,
    "straggler and a stop": straggler_and_stop,
    "workers started anew": workers_anew,
    "ring": ring,
    "experts": experts,
    "LBFGS": lbfgs,
    "closure": adam_closure,
    "two loaders": two_loaders,
    "no torch.optim": by_hand,
    "GAN 1:1": gan,
    "GAN 5:1": many_critic_steps,
    "actor-critic": actor_critic,
}

VARIANTS: Final = 3


def variant(family: str, number: int, seed: int) -> Job:
    """The same job whenever family, number and seed are."""
    return FAMILIES[family](Draw(random.Random(f"{seed} {family} {number}")))
