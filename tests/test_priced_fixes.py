"""A finding's gain is that of the fix it shows: what `dsprof whatif` says of the knobs that `dsprof fix` would turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from synthetic import Job, constant
from test_next_commands import SMALL, ddp, one_bucket, one_tensor
from test_rules_data import bound_to
from test_rules_data import job as loading
from test_rules_gather import job as sharded
from test_rules_gather import of_deepspeed
from test_rules_redundant import accumulating
from test_zero_knobs import ALONE, ELEMENTS, config, waiting
from test_zero_knobs import job as layered

from dsprof.analyzer.ask import ask
from dsprof.analyzer.judge import judge
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import is_predicted, turned
from dsprof.trace import Trace

JOBS: dict[str, tuple[Callable[[], Trace], dict[str, set[str]]]] = {
    "one tensor over a network": (one_tensor, {"comm.volume": {"ddp.comm_hook"}}),
    "one bucket": (one_bucket, {"comm.large-bucket": {"ddp.bucket_cap_mb"}}),
    "small buckets": (
        lambda: Job(buckets=SMALL, latency_ms=4.0, facts=ddp(*SMALL)).trace(),
        {"comm.small-messages": {"ddp.bucket_cap_mb"}},
    ),
    "micro-batches that reduce": (lambda: accumulating().trace(), {"comm.redundant-reduce": {"ddp.accumulate"}}),
    # No comm.volume: of a step of 87 ms the link is busy for 65, of which 40 are hidden behind 60 of computation, so
    # gathering earlier could hide all but 5 of the 25 that are waited for.
    "parameters freed": (
        lambda: sharded().trace(),
        {"comm.redundant-gather": {"fsdp2.reshard_after_forward"}},
    ),
    "stage 3 where 2 fits": (
        lambda: of_deepspeed().trace(),
        {"comm.redundant-gather": {"zero_optimization.stage"}, "comm.volume": {"bf16.enabled"}},
    ),
    "the loader": (
        lambda: loading(steps=60, data=constant(20), cpus=bound_to(16)).trace(),
        {"data.stall": {"loader.num_workers", "loader.persistent_workers"}},
    ),
    "the engine's small buckets": (
        lambda: waiting(latency_ms=6.0, reduced=(4096, 65536)).sharded(),
        {"comm.small-messages": {"zero_optimization.reduce_bucket_size"},
         "comm.exposed": {"zero_optimization.overlap_comm"}},
    ),
    "DeepSpeed's small buckets": (
        lambda: layered(config("deepspeed", 2, reduce_bucket_size=512), gathers=False, latency_ms=6.0,
                        reduced=(4096, 65536)).sharded(),
        {"comm.small-messages": {"zero_optimization.reduce_bucket_size"}},
    ),
    "stage 3, gathered late": (
        lambda: layered(config("deepspeed", **ALONE)).sharded(),
        {"comm.exposed": {"zero_optimization.stage3_prefetch_bucket_size"}},
    ),
    "stage 3, small gathers and scatters": (
        lambda: layered(config("dsprof", **ALONE, reduce_bucket_size=ELEMENTS), layer_ms=0.05, latency_ms=3.0,
                        ms_per_mib=0.1).sharded(),
        {"comm.small-messages": {"zero_optimization.stage3_prefetch_bucket_size",
                                 "zero_optimization.reduce_bucket_size"}},
    ),
}  # fmt: skip
"""A job that is made up, and the knobs that findings of it are to offer first, by code."""


@pytest.mark.parametrize("name", JOBS)
def test_a_finding_gains_what_its_own_fix_saves(name: str) -> None:
    make, expected = JOBS[name]
    whole = study(make())
    offered: dict[str, set[str]] = {}
    for finding in judge(whole).findings:
        fixes = [fix for fix in finding.fixes if fix.knobs and all(is_predicted(key) for key, _ in fix.knobs)]
        for fix in fixes:
            (row,) = ask(whole, [[turned(key, value, "RUN") for key, value in fix.knobs]]).rows
            assert row.gain is not None, (finding.code, fix.knobs, row.reason)
            said = fix.gain or finding.gain
            assert row.gain.ms == pytest.approx(said.ms, rel=1e-6), (finding.code, fix.knobs)
        if fixes and fixes[0] is finding.fixes[0]:
            assert (fixes[0].gain or finding.gain).ms == pytest.approx(finding.gain.ms)
            offered[finding.code] = {key for key, _ in fixes[0].knobs}
    assert {code: offered.get(code) for code in expected} == expected
