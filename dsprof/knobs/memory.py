"""What settings of knobs hold of each rank's memory: what a rank took, and what it would take with other values.

What a rank took was measured; from that the difference counts between what a formula gives for the settings as they
were and as they would be, so what neither changes needs not be known. Where a formula lacks something, there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dsprof.analyzer.memory.rank_memory import RankMemory, in_words, most
from dsprof.analyzer.memory.use_by_step import MemoryUse, main_place

from .knob import Facts
from .registry import find
from .unit_memory import moments, units_of, whole_after_forward

if TYPE_CHECKING:
    from dsprof.engine.config import Held

FOREACH: Final = "optimizer.foreach"
MICRO_BATCH: Final = "train_micro_batch_size_per_gpu"
HELD_BY_CONFIGURATION: Final = frozenset(
    (
        "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_max_live_parameters", "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_optimizer", "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param", "zero_optimization.offload_param.device", "heterogeneous.memory",
        MICRO_BATCH,
    )
)  # fmt: skip
"""Keys of a JSON configuration whose memory is known, by `dsprof.engine.config.held`."""
NEARLY: Final = 0.97
"""Of a peak: what reaches so much of it was its moment. Another thread may let go of a buffer late."""
AUTO: Final = "auto"
MODEL_PARALLEL: Final = ("tensor_parallel", "pipeline")
"""Facts of jobs that divide a model otherwise than over data-parallel ranks."""


@dataclass(frozen=True)
class _Rank:
    """What is known of the rank `number`. facts: its own; ranks: of the job; use: where its tensors are."""

    number: int
    facts: Facts
    ranks: int
    use: MemoryUse

    @property
    def parts(self) -> Mapping[str, int]:
        """schema.MEMORY_PARTS -> bytes."""
        return self.use.parts

    @property
    def on_host(self) -> bool:
        """Whether its tensors are in host memory."""
        return self.use.on_host

    @property
    def peak(self) -> float:
        return float(self.use.peak)

    @property
    def between(self) -> float | None:
        """What lasts from step to step; None: not known."""
        return None if self.use.between is None else float(self.use.between)

    def last(self, kind: str) -> Mapping[str, Any] | None:
        """The last fact of a kind."""
        return next(iter(self.facts.get(kind, ())[-1:]), None)

    def each(self, kind: str) -> list[Mapping[str, Any]]:
        """The last fact of each of what a rank has several of, by their numbers."""
        return list({fact.get("number"): fact for fact in self.facts.get(kind, ())}.values())

    def now(self, key: str, default: Any = None) -> Any:
        """What a knob was; the default where nothing states it, None where models of a job differ in it."""
        values = {repr(one.value): one.value for one in find(key).stated(self.facts) if one.value is not None}
        return None if len(values) > 1 else next(iter(values.values()), default)


def _gradients_of_ddp(rank: _Rank) -> float | None:
    models = rank.each("ddp")
    return float(sum(sum(fact.get("gradient_bytes") or ()) for fact in models)) if models else None


def _bucket_view(rank: _Rank, value: Any) -> float | None:
    """Beside the buckets, which hold all gradients, DDP keeps each gradient, unless that is a part of its bucket."""
    gradients = _gradients_of_ddp(rank)
    return None if gradients is None else gradients * (1 if value else 2)


def _bucket_cap(rank: _Rank, value: Any) -> float | None:
    """However large they are, all buckets together are as large as the gradients."""
    return _gradients_of_ddp(rank)


def _unit(rank: _Rank) -> float | None:
    """The largest of FSDP2, as it computes."""
    fact = rank.last("fsdp")
    if fact is None or not fact.get("bytes") or not fact.get("units"):
        return None
    return float(fact.get("largest") or fact["bytes"] / fact["units"])


def _all_units(rank: _Rank) -> float:
    """Of FSDP2, as they compute."""
    fact = rank.last("fsdp") or {}
    return float(fact.get("gathered") or fact.get("bytes") or 0)


def _stay_whole(rank: _Rank) -> bool:
    """Whether units of FSDP2 are there from their forward to their backward."""
    return rank.now("fsdp2.reshard_after_forward", True) is False


def _prefetched(rank: _Rank, value: Any) -> float | None:
    """Units of FSDP2 that are there before they are needed, beside the one that computes."""
    unit = _unit(rank)
    if unit is None:
        return None
    return 0.0 if _stay_whole(rank) else min(int(value) * unit, max(_all_units(rank) - unit, 0.0))


def _in_units(rank: _Rank, knobs: Mapping[str, Any]) -> float | None:
    """What other units of FSDP2 hold more, or what stays of them after forward: of the most in a step. What computing
    takes beyond parameters, gradients and activations is what was measured, where its moment was the step's peak."""
    fact, modules = rank.last("fsdp"), rank.now("fsdp2.modules_per_unit", 1)
    reshard = rank.now("fsdp2.reshard_after_forward", True)
    if fact is None or not modules or reshard is None:
        return None
    units = units_of(fact, int(modules), 1 / rank.ranks, rank.on_host)
    if units is None:
        return None
    then = units.merged(int(knobs.get("fsdp2.modules_per_unit", modules)) / int(modules))
    if then is None:
        return None
    activations, gradients = (float(rank.parts.get(part, 0)) for part in ("activations", "gradients"))
    activations = max(activations - whole_after_forward(units, reshard, rank.ranks), 0.0)
    was, will = (
        moments(of, value, rank.ranks, activations, gradients)
        for of, value in ((units, reshard), (then, knobs.get("fsdp2.reshard_after_forward", reshard)))
    )
    work = 0.0
    if rank.between is not None and rank.peak - rank.between > max(was.computing, was.others):
        work = rank.peak - rank.between - was.computing
    return will.peak(work) - was.peak(work)


def _foreach(rank: _Rank, value: Any) -> float | None:
    """torch: "the foreach implementation uses ~ sizeof(params) more peak memory", as its intermediates are lists of
    all tensors."""
    return float(rank.parts["parameters"]) if value and "parameters" in rank.parts else 0.0 if not value else None


def _was_foreach(rank: _Rank) -> bool | None:
    """Whether optimizers were; None: some were, or that is not known: on a GPU, torch chooses it for those that do not
    say what they are, and one that says foreach=False is stated likewise."""
    made = {fact.get("implementation") for fact in rank.facts.get("optimizer", ())} or {None}
    if made == {"foreach"}:
        return True
    return False if made == {"fused"} or (rank.on_host and "foreach" not in made) else None


MEMORY: Final[Mapping[str, tuple[Callable[[_Rank, Any], float | None], Any]]] = {
    "ddp.bucket_cap_mb": (_bucket_cap, 25),
    "ddp.gradient_as_bucket_view": (_bucket_view, False),
    "fsdp2.forward_prefetch": (_prefetched, 1),
    "fsdp2.backward_prefetch": (_prefetched, 1),
    FOREACH: (_foreach, None),
}
"""Key -> (rank, value) -> bytes that it holds on that rank, None where that is not known; and the value of a job that
does not state its own."""


UNITS: Final = frozenset(("fsdp2.reshard_after_forward", "fsdp2.modules_per_unit"))
"""Keys whose memory is that of FSDP2's units (`unit_memory`)."""
NOTHING: Final = frozenset(
    (
        "affinity.cores", "ddp.accumulate", "ddp.broadcast_buffers", "ddp.find_unused_parameters", "gc.every",
        "gc.freeze", "optimizer.fused",
    )
)  # fmt: skip
"""Knobs whose values hold no memory of a rank's tensors."""


def has_memory(key: str) -> bool:
    """Whether it is known what values of a knob hold."""
    return key in MEMORY or key in UNITS or key in HELD_BY_CONFIGURATION


def _all_known(knobs: Mapping[str, Any]) -> bool:
    """Whether some of them hold memory, and it is known of each what it holds."""
    return any(map(has_memory, knobs)) and all(has_memory(key) or key in NOTHING for key in knobs)


def memory_with(
    knobs: Mapping[str, Any], uses: Sequence[MemoryUse], facts: Facts, world_size: int
) -> tuple[RankMemory, ...]:
    """What each rank takes, and would take with these settings. Empty where one of them is not known to hold anything,
    or where a rank does not state what its formula needs.

    uses: as measured, of the ranks that were captured; facts: of the run, by kind; world_size: ranks of the job
    """
    if not _all_known(knobs):
        return ()
    places: dict[int, list[MemoryUse]] = {}
    for use in uses:
        places.setdefault(use.rank, []).append(use)
    told, found = _by_rank(facts, places), []
    for number in sorted(places):
        main = main_place(places[number], number)
        assert main is not None
        more = _more(_Rank(number, told[number], world_size, main), knobs)
        if more is None or not math.isfinite(more):
            return ()
        found.append(RankMemory(number, main.place, main.peak, max(main.peak + more, 0.0), main.capacity))
    return tuple(found)


def _by_rank(facts: Facts, ranks: Collection[int]) -> dict[int, dict[str, list[Mapping[str, Any]]]]:
    """What each of these ranks says of itself, by kind, and what says of no rank that it is of it."""
    found: dict[int, dict[str, list[Mapping[str, Any]]]] = {rank: {kind: [] for kind in facts} for rank in ranks}
    for kind, all_of in facts.items():
        for fact in all_of:
            for rank in (fact["rank"],) if "rank" in fact else ranks:
                if rank in found:
                    found[rank][kind].append(fact)
    return found


def in_words_with(knobs: Mapping[str, Any], findings: Mapping[str, Any], facts: Facts) -> str:
    """The same of the rank that would take most, in words, from a findings.json; empty where it is not known."""
    if not _all_known(knobs):
        return ""
    uses = [MemoryUse(**use) for use in findings.get("memory_use", ())]
    captured = len({use.rank for use in uses})
    world_size = findings.get("run", {}).get("ranks", {}).get("expected", captured)
    worst = most(memory_with(knobs, uses, facts, world_size))
    return "" if worst is None else in_words(worst)


def _more(rank: _Rank, knobs: Mapping[str, Any]) -> float | None:
    """Bytes that a rank holds more with these settings; None: that is not known."""
    more = 0.0
    for key, value in knobs.items():
        if key not in MEMORY:
            continue
        formula, usual = MEMORY[key]
        was = _was_foreach(rank) if key == FOREACH else rank.now(key, usual)
        now, then = None if was is None else formula(rank, was), formula(rank, value)
        if now is None or then is None:
            return None
        more += then - now
    for keys, together in ((UNITS, _in_units), (HELD_BY_CONFIGURATION, _by_configuration)):
        mine = {key: value for key, value in knobs.items() if key in keys}
        added = together(rank, mine) if mine else 0.0
        if added is None:
            return None
        more += added
    return more


def _by_configuration(rank: _Rank, knobs: Mapping[str, Any]) -> float | None:
    """What another configuration holds more."""
    from dsprof.engine.config import ELEMENT_BYTES, as_far_as_known, data_parallel_ranks, held

    fact = rank.last("config")
    if fact is None or not isinstance(fact.get("content"), Mapping):
        return None
    if len(rank.facts["config"]) > 1 or AUTO in knobs.values():  # several engines; what a trainer fills in later
        return None
    content = fact["content"]
    now, then = as_far_as_known(content), as_far_as_known(_with(content, knobs))
    if rank.on_host:  # there, nothing is offloaded to another memory
        nothing = {f"zero_optimization.{name}": None for name in ("offload_optimizer", "offload_param")}
        now, then = (as_far_as_known(_with(one, nothing)) for one in (content, _with(content, knobs)))
    deepspeed = fact.get("dialect") == "deepspeed"
    if deepspeed and any(rank.facts.get(kind) for kind in MODEL_PARALLEL):
        return None  # its configuration does not tell how many ranks share what
    before, after, largest = None, None, 0.0
    # Of a batch that stays, other micro-batches are more or fewer, which dsprof's engine adds up.
    if set(knobs) - {MICRO_BATCH} or not deepspeed:
        optimizer = rank.last("optimizer" if deepspeed else "trained")
        needed = bool(set(knobs) - {MICRO_BATCH}) or now.train_batch_size is not None
        if optimizer is None or not optimizer.get("elements"):
            if needed:
                return None
        else:
            was, will = (one.held_share(rank.number, rank.ranks) for one in (now, then))
            if was is None or will is None or (deepspeed and not was):
                return None
            # From stage 1 on, an optimizer of DeepSpeed's has its rank's part.
            elements = float(optimizer["elements"]) / (was if deepspeed and now.zero_optimization.stage >= 1 else 1)
            largest, frozen = (float(optimizer.get(name) or 0) for name in ("largest", "frozen"))
            before, after = (
                held(
                    one, elements, share, data_parallel_ranks(one, rank.ranks), deepspeed=deepspeed, largest=largest,
                    frozen=frozen, on_host=rank.on_host, sizes=optimizer.get("of_parameters") or (),
                )
                for one, share in ((now, was), (then, will))
            )  # fmt: skip
    times = 1.0
    if MICRO_BATCH in knobs:
        size, wanted = now.train_micro_batch_size_per_gpu, knobs[MICRO_BATCH]
        if size is None or wanted is None or "activations" not in rank.parts:
            return None
        times = float(wanted) / size
    gradient = largest * ELEMENT_BYTES[now.trained_type]
    return _in_a_step(rank, before, after, times, gradient)


def _in_a_step(rank: _Rank, before: Held | None, after: Held | None, times: float, gradient: float) -> float:
    """What a step takes more at its peak, which is when backward begins, with the first gradient; or when the optimizer
    steps. What is there beyond what is known then (gradients of activations, what is computed again) is for the
    micro-batch too: where the peak was in backward, it is the rest of it.

    before, after: None: they are the same; times: what a micro-batch is of the one that was; gradient: bytes of the
    largest one
    """
    from dsprof.engine.config import Held

    activations = float(rank.parts.get("activations", 0))
    if before is None or after is None:
        before = after = Held(0.0, 0.0, 0.0, 0.0, 0.0)
    # Parameters of stage 3 that are whole were there when activations were measured, unless there are more of them:
    # what is computed again fetches its own.
    own = activations - before.whole if before.whole <= activations else activations
    if rank.between is None:
        return after.total - before.total + own * (times - 1)
    lasting = rank.between + after.lasting - before.lasting
    rest = rank.peak - rank.between - before.sums - activations
    if rank.between + before.update >= rank.peak * NEARLY:
        rest = 0.0  # it was the optimizer's peak
    fixed = min(gradient, max(rest, 0.0))
    work = fixed + max(rest - fixed, 0.0) * times
    was = max(rank.between + before.sums + activations + max(rest, 0.0), rank.between + before.update)
    will = max(
        lasting + after.sums + own * times + (activations - own) + after.whole - before.whole + work,
        lasting + after.update,
    )
    return will - was


def _with(content: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other values under keys such as `zero_optimization.stage`."""
    changed = dict(content)
    for key, value in knobs.items():
        first, _, rest = key.partition(".")
        inner = changed.get(first)
        changed[first] = _with(inner if isinstance(inner, Mapping) else {}, {rest: value}) if rest else value
    return changed
