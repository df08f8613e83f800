"""What-ifs of ZeRO's and FSDP2's settings, on made-up jobs of four layers that gather, compute and reduce in turn."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import BACKWARD, BROADCAST, FORWARD, OPTIMIZER, Accumulating, _collective, _record, _waited

from dsprof.analyzer import analyze
from dsprof.analyzer.ask import Answered, ask
from dsprof.analyzer.finding import Fix
from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.comm import by_hand
from dsprof.analyzer.rules.comm.collectives import CODES
from dsprof.analyzer.rules.comm.possible_links import links_around
from dsprof.analyzer.rules.comm.shards import sharding_ms
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.ondisk import Flag
from dsprof.schema import COLUMNS, SHARDING, Kind
from dsprof.trace import Trace, concat_rows
from dsprof.trace.capture import Capture

LAYERS = 4
ELEMENTS = 1 << 16
GATHER_MS = 0.2 + ELEMENTS * 4 / 2**20 * 16
"""4.2 ms for 256 KiB."""


@dataclass
class Layered(Accumulating):
    """Each layer takes `layer_ms` in forward and twice as long in backward, before which its parameters are gathered
    and waited for; a backward ends with reductions of the gradients, each waited for at once."""

    micro: int = 1
    layer_ms: float = 10.0
    ms_per_mib: float = 16.0
    gathers: bool = True
    again: bool = True
    """Whether backward gathers, too."""
    reduced: tuple[int, ...] = (2 * ELEMENTS * 4, 2 * ELEMENTS * 4)
    """Bytes of each reduction: one after the first half of a backward, the other after the second."""

    def captures(self) -> dict[int, Capture]:
        draw = np.random.default_rng(self.seed)
        rows: list[tuple[Any, ...]] = []
        now, seq = 1.0, 0

        def work(ms: float) -> float:
            return ms * (1 + self.jitter * draw.standard_normal())

        def moved(size: int) -> None:
            nonlocal now, seq
            issued, now = now, now + self.latency_ms + size / 2**20 * self.ms_per_mib
            rows.extend([_collective(issued, now, size, seq, BROADCAST), _waited(issued, now, seq)])
            seq += 1

        for _ in range(self.steps):
            for _ in range(self.micro):
                begin = now
                for _ in range(LAYERS):
                    now += work(0.1)
                    if self.gathers:
                        moved(ELEMENTS * 4)
                    now += work(self.layer_ms)
                rows.append(_record(Kind.PHASE, FORWARD, begin, now, None, Flag.GRAD))
                begin = now
                for layer in range(LAYERS):
                    now += work(0.1)
                    if self.gathers and self.again:
                        moved(ELEMENTS * 4)
                    now += work(2 * self.layer_ms)
                    if layer % 2:
                        moved(self.reduced[layer // 2])
                now += work(1)
                rows.append(_record(Kind.PHASE, BACKWARD, begin, now))
            begin, now = now, now + work(5)
            rows.append(_record(Kind.PHASE, OPTIMIZER, begin, now))
        captures = self._captures_of(dict.fromkeys(range(self.ranks), rows))
        for rank, capture in captures.items():
            capture.facts.extend(fact for fact in self.facts if fact.get("rank") == rank)
        return captures

    def sharded(self) -> Trace:
        """The trace, with each communication called what it is."""
        trace = self.trace()
        rows = trace.rows.astype({"name": object, "purpose": object})
        for kind in ("comm", "wait"):
            of_kind = rows["kind"] == kind
            reduces = (rows["kind"] == "comm") & (rows["bytes"] != ELEMENTS * 4)
            gradient = of_kind & rows["seq"].isin(rows["seq"][reduces])
            rows.loc[of_kind, ["name", "purpose"]] = ["all_gather", "parameter"]
            rows.loc[gradient, ["name", "purpose"]] = ["reduce_scatter", "gradient"]
        return Trace.of(trace.run, rows)


def config(dialect: str, stage: int = 3, **zero: Any) -> list[dict[str, Any]]:
    """What both ranks state of the engine's configuration."""
    content = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage, **zero}}
    facts = [{"fact": "config", "dialect": dialect, "path": "ds.json", "content": content, "rank": r} for r in (0, 1)]
    if dialect == "deepspeed":
        facts += [{"fact": "deepspeed", "zero_stage": stage, "gradient_dtype": "float32", "rank": r} for r in (0, 1)]
    return facts


ALONE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Each module's parameters are gathered when it needs them, in forward and in backward."""


def job(facts: list[dict[str, Any]], **changes: Any) -> Layered:
    return Layered(**{"jitter": 0.002, "steps": 24, "facts": facts, **changes})


def asked(made: Layered, key: str, *values: Any) -> list[Answered]:
    whole = study(made.sharded())
    return list(ask(whole, [[turned(key, value, "RUN")] for value in values]).rows)


def saved(made: Layered, key: str, *values: Any) -> list[float]:
    rows = asked(made, key, *values)
    assert all(row.gain is not None for row in rows), [row.reason for row in rows]
    assert all(row.gain.low <= row.gain.ms <= row.gain.high for row in rows if row.gain is not None)
    return [row.gain.ms for row in rows if row.gain is not None]


def reason(made: Layered, key: str, value: Any) -> str:
    (row,) = asked(made, key, value)
    assert row.gain is None
    return row.reason


PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
REDUCED = "zero_optimization.reduce_bucket_size"
LIVE = "zero_optimization.stage3_max_live_parameters"


@pytest.mark.parametrize("dialect", ["dsprof", "deepspeed"])
def test_what_is_gathered_ahead_is_hidden_by_a_layer(dialect: str) -> None:
    """All but the first gather; the last layer's are kept over the turn. More ahead hides no more."""
    nothing, one, all_of_it = saved(job(config(dialect, **ALONE)), PREFETCH, 0, ELEMENTS, 10**9)
    assert nothing == 0
    assert one == pytest.approx(7 * GATHER_MS, rel=0.15)
    assert all_of_it >= 0.6 * one


def test_more_parameters_that_may_be_there_at_once() -> None:
    """With room for one layer dsprof's engine gathers each again; with room for all it keeps them over the turn."""
    facts = config("dsprof", stage3_prefetch_bucket_size=0, stage3_max_live_parameters=ELEMENTS)
    some, most = saved(job(facts), LIVE, 3 * ELEMENTS, 10**9)
    assert 0.5 * GATHER_MS < some < most == pytest.approx(4 * GATHER_MS, rel=0.15)


def test_less_ahead_or_less_at_once_is_not_told() -> None:
    made = job(config("dsprof", stage3_prefetch_bucket_size=3 * ELEMENTS))
    assert "the run had 196,608 elements" in reason(made, PREFETCH, ELEMENTS)
    assert "the run had 1,000,000,000 elements" in reason(made, LIVE, ELEMENTS)
    assert "this is a setting of stage 3" in reason(job(config("dsprof", stage=2)), PREFETCH, ELEMENTS)


STAGE = "zero_optimization.stage"


def test_stage_2_in_the_place_of_3_gathers_once() -> None:
    """Eight gathers of 4.2 ms become one of four times the bytes: 7 latencies and as many bytes as 4 have go."""
    (two,) = saved(job(config("dsprof", **ALONE)), STAGE, 2)
    assert two == pytest.approx(4 * GATHER_MS + 3 * 0.2, rel=0.15)


@pytest.mark.parametrize(("backend", "twice"), [("gloo", False), ("nccl", True), ("ucc", True), (None, True)])
def test_stages_1_and_2_of_deepspeed_reduce_all_gradients_on_all_ranks(backend: str | None, twice: bool) -> None:
    """Which moves twice the bytes of a reduce-scatter, but on gloo."""
    trace = job(config("deepspeed", **ALONE)).sharded()
    for group in trace.rows["group"].dropna().unique():
        trace.run.groups[str(group)] = {"ranks": [0, 1], **({"backend": backend} if backend else {})}
    (row,) = ask(study(trace), [[turned(STAGE, 2, "RUN")]]).rows
    assert (row.notes[-1] == "gradients are all-reduced, which moves twice the bytes of a reduce-scatter") is twice


def with_work(trace: Trace, of: pd.Series[bool], ms: float) -> Trace:
    """The trace with `ms` of DeepSpeed's own work before each of these rows."""
    rows = trace.rows
    nothing = dict.fromkeys(("purpose", "group", "seq", "bytes", "issue_ns", "arrival_ns"), pd.NA)
    start, dur_ns = rows[of]["start_ns"] - round(ms * 1e6), round(ms * 1e6)
    work = rows[of].assign(kind="module", name=SHARDING, lane="main", start_ns=start, dur_ns=dur_ns, **nothing)
    joined = concat_rows([rows, work.astype(COLUMNS)])
    order = ["rank", "start_ns", "dur_ns"]
    return Trace.of(trace.run, joined.sort_values(order, ascending=[True, True, False], ignore_index=True))


def is_gradient(trace: Trace) -> pd.Series[bool]:
    return (trace.rows["kind"] == "comm") & (trace.rows["purpose"] == "gradient")


def test_what_stage_3_works_for_modules_goes_with_it() -> None:
    trace = job(config("deepspeed", **ALONE)).sharded()
    gathers = (trace.rows["kind"] == "comm") & (trace.rows["purpose"] == "parameter")
    plain, worked = (study(one) for one in (trace, with_work(trace, gathers, 1.0)))
    (before,), (after,) = (ask(one, [[turned(STAGE, 2, "RUN")]]).rows for one in (plain, worked))
    assert before.gain is not None
    assert after.gain is not None
    assert after.gain.ms - before.gain.ms == pytest.approx(sharding_ms(worked), rel=0.1)
    assert after.gain.high - after.gain.low > before.gain.high - before.gain.low  # how much of it goes is not sure


def test_what_deepspeed_works_for_each_bucket_goes_with_all_but_one() -> None:
    """Two buckets become one; copying their bytes does not become less."""
    facts = config("deepspeed", stage=2, reduce_bucket_size=8 * ELEMENTS)
    made = job(facts, gathers=False, reduced=(32 * ELEMENTS, 32 * ELEMENTS), layer_ms=20.0)
    trace = made.sharded()
    plain, worked = (study(one) for one in (trace, with_work(trace, is_gradient(trace), 2.0)))
    (before,), (after,) = (ask(one, [[turned(REDUCED, 16 * ELEMENTS, "RUN")]]).rows for one in (plain, worked))
    assert before.gain is not None
    assert after.gain is not None
    told = after.gain.ms - before.gain.ms
    assert 0.1 * sharding_ms(worked) < told < 0.8 / 2 * sharding_ms(worked)
    assert after.gain.low < before.gain.ms  # what it is for is not sure


def test_gradients_reduced_once_in_stage_1() -> None:
    made = job(config("dsprof", stage=2), micro=2, gathers=False)
    (one,) = saved(made, STAGE, 1)
    assert one == pytest.approx(2 * (0.2 + 8), rel=0.1)
    (same,) = saved(job(config("dsprof", stage=2), gathers=False), STAGE, 1)
    assert same == 0


@pytest.mark.parametrize("dialect", ["dsprof", "deepspeed"])
def test_what_is_worked_for_reductions_goes_with_them(dialect: str) -> None:
    trace = job(config(dialect, stage=2), micro=2, gathers=False).sharded()
    plain, worked = (study(one) for one in (trace, with_work(trace, is_gradient(trace), 2.0)))
    (before,), (after,) = (ask(one, [[turned(STAGE, 1, "RUN")]]).rows for one in (plain, worked))
    assert before.gain is not None
    assert after.gain is not None
    assert after.gain.ms - before.gain.ms == pytest.approx(sharding_ms(worked) / 2, rel=0.15)
    assert after.gain.low < before.gain.ms  # adding gradients up may take as long


def test_where_no_backward_is_seen_stages_reduce_the_same() -> None:
    trace = job(config("dsprof", stage=2), gathers=False).sharded()
    rows = trace.rows[~((trace.rows["kind"] == "phase") & (trace.rows["name"] == "backward"))]
    (row,) = ask(study(Trace.of(trace.run, rows)), [[turned(STAGE, 1, "RUN")]]).rows
    assert row.gain is None or row.gain.ms == 0


def test_stages_that_a_run_does_not_tell() -> None:
    whole = job(config("dsprof", stage=1), gathers=False, micro=2)
    assert "where each module would wait for its own in stage 3 is not told" in reason(whole, STAGE, 3)
    assert "is not told by this run" in reason(whole, STAGE, 2)
    assert "the run has 1" in reason(whole, STAGE, 0)


OVERLAP = "zero_optimization.overlap_comm"


def test_reductions_beside_backward() -> None:
    """The first of two is hidden by the second half of backward; the last is not."""
    (beside,) = saved(job(config("dsprof", stage=2, overlap_comm=False), gathers=False), OVERLAP, True)
    assert beside == pytest.approx(0.2 + 8, rel=0.1)
    rows = asked(job(config("deepspeed", stage=2), gathers=False), OVERLAP, True)
    assert rows[0].gain is not None
    assert rows[0].gain.ms == 0
    assert rows[0].gain.high > 0
    assert "waits for each reduction where it issues it, whatever overlap_comm says" in rows[0].notes[0]


WEIGHTS, GRADIENTS = (f"zero_optimization.zero_quantized_{what}" for what in ("weights", "gradients"))
FREEZE = "optimizer.params.freeze_step"
PER_MIB = 16.0
UNEQUAL = (8 * ELEMENTS * 4, 2 * ELEMENTS * 4)
"""Bytes of reductions, of which a link is told."""


def test_parameters_that_travel_in_int8() -> None:
    """Of float32 a quarter and the scales are left; a CPU packs its half of each gather, and unpacks all."""
    (told,) = saved(job(config("dsprof", **ALONE)), WEIGHTS, True)
    link = 8 * (GATHER_MS - 0.2) * (1 - (1 + 4 / 256) / 4)
    assert told == pytest.approx(link - 8 * ELEMENTS * (5.5 / 2 + 1.2) / 1e6, rel=0.1)


def test_gradients_that_travel_in_int4() -> None:
    made = job(config("dsprof", stage=2), gathers=False, reduced=UNEQUAL)
    (told,) = saved(made, GRADIENTS, True)
    elements = 10 * ELEMENTS
    link = elements * 4 / 2**20 * PER_MIB * (1 - (1 / 2 + 4 / 256) / 4)
    assert told == pytest.approx(link - elements * (8.0 + 2.5) / 1e6, rel=0.1)
    (same,) = saved(made, GRADIENTS, False)
    assert same == 0


def optimizer(kind: str, **params: Any) -> list[dict[str, Any]]:
    """What both ranks state of dsprof's engine in stage 0 with an optimizer."""
    facts = config("dsprof", stage=0)
    for fact in facts:
        fact["content"]["optimizer"] = {"type": kind, "params": params}
    return facts


def test_momenta_that_travel_as_signs() -> None:
    """Of ten layers' float32 a 32nd is left and two latencies of two; a CPU packs and unpacks 50 ns a value."""
    made = job(optimizer("Adam"), gathers=False, reduced=UNEQUAL)
    (row,) = asked(made, "optimizer.type", "OneBitAdam")
    assert row.gain is not None
    values = 10 * ELEMENTS
    link = values * 4 / 2**20 * PER_MIB * (1 - 1 / 32)
    assert row.gain.ms == pytest.approx(link - values * 50 / 1e6, rel=0.1)
    assert row.gain.low < row.gain.ms - 0.4 * values * 50 / 1e6
    assert "the first 100,000 (freeze_step) reduce whole gradients" in row.notes[0]
    assert row.notes[1].startswith("it trains differently")


def test_a_1_bit_optimizer_that_a_run_does_not_tell() -> None:
    made = job(optimizer("Adam"), gathers=False, reduced=UNEQUAL)
    assert "of optimizers only OneBitAdam are predicted" in reason(made, "optimizer.type", "Lamb")
    sharded = job(config("dsprof", stage=2), gathers=False)
    assert "stage 0 of ZeRO, and the run has stage 2" in reason(sharded, "optimizer.type", "OneBitAdam")
    several = job(optimizer("Adam"), gathers=False, micro=2)
    assert "in several backwards of a step" in reason(several, "optimizer.type", "OneBitAdam")


def test_a_warm_up_that_ends_earlier() -> None:
    """A run in the warm-up tells what the steps behind it take; one of another optimizer has none."""
    (shorter,) = saved(job(optimizer("OneBitAdam"), gathers=False, reduced=UNEQUAL), FREEZE, 10)
    (other,) = saved(job(optimizer("Adam"), gathers=False, reduced=UNEQUAL), FREEZE, 10)
    assert shorter > 0 == other
    behind = job(optimizer("OneBitAdam", freeze_step=2), gathers=False, reduced=UNEQUAL)
    assert "behind the warm-up" in reason(behind, FREEZE, 10)


def test_packing_that_takes_longer_than_a_fast_link_saves() -> None:
    """Of 4 GB/s: a CPU packs a quarter of that."""
    (told,) = saved(job(config("dsprof", stage=2), gathers=False, reduced=UNEQUAL, ms_per_mib=0.25), GRADIENTS, True)
    assert told < 0


def test_whole_numbers_that_a_run_does_not_tell() -> None:
    assert "it takes stage 3, and the run has 2" in reason(job(config("dsprof", stage=2)), WEIGHTS, True)
    assert "it takes stage 3, and the run has 2" in reason(job(config("deepspeed", stage=2)), GRADIENTS, True)
    packed = job(config("dsprof", zero_quantized_weights=True))
    assert "told by a run without zero_quantized_weights" in reason(packed, WEIGHTS, False)
    assert "no gathers of parameters were seen" in reason(job(config("dsprof"), gathers=False), WEIGHTS, True)


FSDP = [{"fact": "fsdp", "rank": r, "version": 2, "units": 4, "bytes": LAYERS * ELEMENTS * 4, "site": "train.py:9"}
        for r in (0, 1)]  # fmt: skip


def test_fsdp2_keeps_what_forward_has_gathered() -> None:
    (kept,) = saved(job(FSDP), "fsdp2.reshard_after_forward", False)
    assert kept == pytest.approx(4 * GATHER_MS, rel=0.1)
    key = "fsdp2.reshard_after_forward"
    assert "does not tell where backward would wait" in reason(job(FSDP, again=False), key, True)
    assert "on 2 ranks" in reason(job(FSDP), key, 2)


@pytest.mark.parametrize("key", ["fsdp2.forward_prefetch", "fsdp2.backward_prefetch"])
def test_fsdp2_on_cpus_hides_nothing_by_prefetching(key: str) -> None:
    (row,) = asked(job(FSDP), key, 2)
    assert row.gain is not None
    assert row.gain.ms == 0
    assert row.gain.low < 0 < row.gain.high
    assert "waits for a gather where it issues it" in row.notes[0]


@pytest.mark.parametrize("key", ["zero_optimization.offload_optimizer", "zero_optimization.offload_param.device"])
def test_offloading_that_a_run_does_not_do(key: str) -> None:
    value = {"device": "cpu"} if key.endswith("optimizer") else "cpu"
    assert "is not told by a run that offloads nothing" in reason(job(config("dsprof")), key, value)


def test_the_finding_of_the_engine_offers_its_key() -> None:
    """As much ahead as the next module has, by the name of its key."""
    analysis = analyze(job(config("dsprof", **ALONE)).sharded())
    knobs = [dict(fix.knobs) for one in analysis.findings for fix in one.fixes]
    assert any(PREFETCH in of for of in knobs), [one.title for one in analysis.findings]


def fixes_of(made: Layered) -> list[tuple[str, Fix]]:
    """What the findings of a run offer to set, each with the code of its finding."""
    return [(one.code, fix) for one in analyze(made.sharded()).findings for fix in one.fixes if fix.knobs]


def test_the_key_that_a_finding_offers_is_priced_as_its_what_if() -> None:
    made = job(config("dsprof", **ALONE))
    fixes = [fix for code, fix in fixes_of(made) if code == "comm.exposed"]
    alone = saved(made, PREFETCH, *(dict(fix.knobs)[PREFETCH] for fix in fixes))
    assert [fix.gain.ms for fix in fixes if fix.gain is not None] == pytest.approx(alone)
    assert alone == pytest.approx([7 * GATHER_MS], rel=0.15)


def test_larger_buckets_are_priced_as_the_engine_would_gather_with_them() -> None:
    """Of layers that take next to nothing fewer gathers and scatters are what gains, and both keys say how many."""
    facts = config("dsprof", **ALONE, reduce_bucket_size=ELEMENTS)
    made = job(facts, layer_ms=0.05, latency_ms=3.0, ms_per_mib=0.1)
    (fix,) = [fix for code, fix in fixes_of(made) if code == "comm.small-messages"]
    knobs = dict(fix.knobs)
    assert set(knobs) == {PREFETCH, REDUCED}
    (gathers,), (scatters,) = (saved(made, key, knobs[key]) for key in (PREFETCH, REDUCED))
    assert fix.gain is not None
    assert gathers > scatters == pytest.approx(3.0, rel=0.1)
    assert fix.gain.ms == pytest.approx(gathers + scatters, rel=0.1)


def test_gathers_that_are_late_are_no_small_messages() -> None:
    """What a larger bucket hides behind layers is comm.exposed: a few latencies are the least of it."""
    made = job(config("dsprof", **ALONE, reduce_bucket_size=ELEMENTS))
    assert {code for code, fix in fixes_of(made) if PREFETCH in dict(fix.knobs)} == {"comm.exposed"}


def test_the_engine_waits_for_each_reduction_and_is_told_to_overlap() -> None:
    made = job(config("dsprof", stage=2, overlap_comm=False), gathers=False)
    (fix,) = [fix for code, fix in fixes_of(made) if code == "comm.exposed"]
    assert dict(fix.knobs) == {OVERLAP: True}
    assert fix.title.startswith("zero_optimization.overlap_comm: true: ")
    assert fix.gain is not None
    assert fix.gain.ms == pytest.approx(saved(made, OVERLAP, True)[0])


def test_the_engine_is_told_no_overlap_that_hides_nothing() -> None:
    """One reduction, at the end of backward."""
    made = job(config("dsprof", stage=2, overlap_comm=False), gathers=False, reduced=(0, 4 * ELEMENTS * 4))
    assert [fix for code, fix in fixes_of(made) if code == "comm.exposed"] == []


def waiting(**changes: Any) -> Layered:
    """The engine's stage 2, whose reductions are waited for one by one: a bucket is full of any of them."""
    return job(config("dsprof", stage=2, overlap_comm=False, reduce_bucket_size=512), gathers=False, **changes)


def test_small_reductions_of_one_size_are_bound_by_latency() -> None:
    """6 ms for 4 KiB are no link's bytes."""
    (fix,) = [fix for code, fix in fixes_of(waiting(latency_ms=6.0, reduced=(4096, 4096)))
              if code == "comm.small-messages"]  # fmt: skip
    assert dict(fix.knobs) == {"zero_optimization.reduce_bucket_size": 2100}
    assert fix.gain is not None
    assert fix.gain.low > 0
    assert fix.gain.ms == pytest.approx(6.0, rel=0.05)


def test_reductions_of_one_size_may_be_slow_by_their_bytes() -> None:
    """256 KiB over 40 MB/s: that fewer of them save anything is not sure."""
    made = waiting(ms_per_mib=25.0, reduced=(ELEMENTS * 4, ELEMENTS * 4))
    gains = [one.gain.low for one in analyze(made.sharded()).findings if one.code == "comm.small-messages"]
    assert all(low <= 0 for low in gains)


def test_what_overlap_would_gain_is_unknown_and_buckets_are_judged_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Any:
        raise NotJudged("as on a device")

    monkeypatch.setattr("dsprof.analyzer.rules.comm.engine_reductions.with_overlap", refused)
    analysis = analyze(waiting(latency_ms=6.0, reduced=(4096, 65536)).sharded())
    assert [one.code for one in analysis.findings] == ["comm.small-messages"]
    assert {code: why for code, why in analysis.not_judged.items() if code in CODES} == {
        "comm.exposed": "as on a device"
    }


def test_of_stages_without_sharded_parameters_no_key_of_stage_3_is_offered() -> None:
    made = job(config("dsprof", stage=2, overlap_comm=False, stage3_prefetch_bucket_size=0), latency_ms=3.0)
    found = fixes_of(made)
    assert found
    assert not [fix for _, fix in found if PREFETCH in dict(fix.knobs)]


def test_what_gathering_more_at_a_time_saves_is_said_once() -> None:
    """Layers that take next to nothing hide nothing: fewer gathers are all that the larger bucket gains."""
    made = job(config("dsprof", **ALONE), layer_ms=0.05, latency_ms=3.0, ms_per_mib=0.1)
    assert [code for code, fix in fixes_of(made) if PREFETCH in dict(fix.knobs)] == ["comm.small-messages"]


def test_buckets_of_the_engine_that_are_waited_for() -> None:
    """Two reductions of a step become one: a latency less. Smaller ones are not told by larger ones."""
    facts = config("dsprof", stage=2, overlap_comm=False, reduce_bucket_size=8 * ELEMENTS)
    made = job(facts, gathers=False, reduced=(8 * ELEMENTS, 32 * ELEMENTS))
    key = "zero_optimization.reduce_bucket_size"
    (one,) = saved(made, key, 16 * ELEMENTS)
    assert one == pytest.approx(0.2, abs=0.1)
    assert "what smaller ones take is not told" in reason(made, key, ELEMENTS)
    assert "stages 1 to 3 only" in reason(job(config("dsprof", stage=0), gathers=False), key, ELEMENTS)


def test_reductions_of_one_size_are_told_by_what_else_moves_over_the_wires() -> None:
    """Of 64 KiB in 2 ms all may be latency; gathers by the same ranks, 2 MiB in 60 ms, say that it is the bytes."""
    ranks = {"shards": [0, 1], "whole": [0, 1], "others": [0, 2]}
    rows = [("shards", 1 << 16, 2.0)] * 4 + [("whole", 2 << 20, 60.0)] * 3 + [("others", 4 << 20, 1.0)]
    table = pd.DataFrame(rows, columns=["group", "bytes", "ms"])
    table = table.assign(transfer_ns=table["ms"] * 1e6, alone_ns=table["ms"] * 1e6)
    run = SimpleNamespace(group=lambda name: {"ranks": ranks[name]})
    made: Any = SimpleNamespace(run=run, judged_collectives=SimpleNamespace(table=table))
    assert by_hand._ms_per_byte(made, "shards", 1 << 17) == pytest.approx(60 / (2 << 20))
    assert by_hand._ms_per_byte(made, "shards", 4 << 20) is None
    assert by_hand._ms_per_byte(made, "others", 1 << 17) == pytest.approx(1 / (4 << 20))


def test_what_the_engine_works_for_buckets_goes_with_their_number() -> None:
    """Two buckets become one; copying their bytes does not become less."""
    facts = config("dsprof", stage=2, overlap_comm=False, reduce_bucket_size=8 * ELEMENTS)
    trace = job(facts, gathers=False, reduced=(32 * ELEMENTS, 32 * ELEMENTS), layer_ms=20.0).sharded()
    plain, worked = (study(one) for one in (trace, with_work(trace, is_gradient(trace), 2.0)))
    (before,), (after,) = (ask(one, [[turned(REDUCED, 16 * ELEMENTS, "RUN")]]).rows for one in (plain, worked))
    assert before.gain is not None
    assert after.gain is not None
    told = after.gain.ms - before.gain.ms
    assert 0.1 * sharding_ms(worked) < told < 0.8 / 2 * sharding_ms(worked)
    assert after.gain.low < before.gain.ms  # what it is for is not sure


def test_a_link_that_was_fitted_to_small_transfers_may_be_slower_for_large_ones() -> None:
    """Of 2 ms for 64 KiB a tenth may be owed to the bytes: 1.6 ms more for eight times as many."""
    link = Link(1.0, 1 / (1 << 16), True, spread=0.1, largest=1 << 16)
    assert len(links_around(link, 1 << 16, 1 << 17)) == 3
    *_, slower = links_around(link, 1 << 16, 1 << 19)
    more = slower.transfer_ms(np.array(1 << 19)) - link.transfer_ms(np.array(1 << 19))
    assert more == pytest.approx(1.6)


@pytest.mark.parametrize("dialect", ["dsprof", "deepspeed"])
@pytest.mark.parametrize(("key", "value"), [(PREFETCH, ELEMENTS), (LIVE, 10**10), ("zero_optimization.stage", 1)])
def test_where_sizes_are_not_told_nothing_is_said_of_other_limits(dialect: str, key: str, value: int) -> None:
    """Gathers of 0 bytes would fit into any limit, and take nothing together."""
    trace = job(config(dialect, **ALONE)).sharded()
    rows = trace.rows.assign(bytes=pd.array([pd.NA] * len(trace.rows), dtype=trace.rows["bytes"].dtype))
    (row,) = ask(study(Trace.of(trace.run, rows)), [[turned(key, value, "RUN")]]).rows
    assert row.gain is None
    assert row.reason == "the run does not tell how large the parameters are that are gathered"


def test_where_sizes_are_not_told_waiting_is_still_a_finding_and_no_value_is_offered() -> None:
    trace = job(config("dsprof", **ALONE)).sharded()
    rows = trace.rows.assign(bytes=pd.array([pd.NA] * len(trace.rows), dtype=trace.rows["bytes"].dtype))
    analysis = analyze(Trace.of(trace.run, rows))
    assert "comm.exposed" in [one.code for one in analysis.findings]
    assert not [fix for one in analysis.findings for fix in one.fixes if PREFETCH in dict(fix.knobs)]
