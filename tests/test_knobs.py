"""What a user can turn: how `--set` is read, and what a run states."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from dsprof.collectors.overrides import install as overrides
from dsprof.knobs import KNOBS, KnobError, Stated, find, parse_settings
from dsprof.knobs.json_config import of_config


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("ddp.bucket_cap_mb=50", "ddp.bucket_cap_mb", 50),
        ("ddp.bucket_cap_mb=0.5", "ddp.bucket_cap_mb", 0.5),
        ("ddp.static_graph=true", "ddp.static_graph", True),
        ("zero_optimization.reduce_bucket_size=5e7", "zero_optimization.reduce_bucket_size", 50_000_000),
        ("optimizer.params.lr=1e-3", "optimizer.params.lr", 0.001),
        ("train_batch_size=16", "train_batch_size", 16),
        ("train_batch_size=auto", "train_batch_size", "auto"),
        ("zero_optimization.overlap_comm=on", "zero_optimization.overlap_comm", True),
        ("zero_optimization.overlap_comm=null", "zero_optimization.overlap_comm", None),
        ("optimizer.type=RAdam", "optimizer.type", "RAdam"),
        ("autotuning.enabled=true", "autotuning.enabled", True),
        ("fsdp2.reshard_after_forward=8", "fsdp2.reshard_after_forward", 8),
        ("fsdp2.reshard_after_forward=false", "fsdp2.reshard_after_forward", False),
        ("affinity.cores=spread", "affinity.cores", "spread"),
        ("pipelining.schedule=1f1b", "pipelining.schedule", "1f1b"),
        ("trainer.lr_scheduler_type=cosine", "trainer.lr_scheduler_type", "cosine"),
        ("env.OMP_NUM_THREADS=4", "env.OMP_NUM_THREADS", "4"),
        ("env.PYTORCH_CUDA_ALLOC_CONF=a:b=c", "env.PYTORCH_CUDA_ALLOC_CONF", "a:b=c"),
    ],
)
def test_a_value_is_read_as_its_knob_takes_it(word: str, key: str, value: object) -> None:
    found = parse_settings([word])
    assert found == {key: value}
    assert type(found[key]) is type(value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ddp.bucket_cap=3"], "did you mean ddp.bucket_cap_mb?"),
        (["reduce_bucket_size=5"], "did you mean zero_optimization.reduce_bucket_size?"),
        (["zero_optimization.reduce_buket_size=5"], "did you mean zero_optimization.reduce_bucket_size?"),
        (["zero_optimization.qqq=5"], "the section zero_optimization has no such key"),
        (["ddp.bucket_cap_mb=-1"], "write a number of 0.001 or more (MiB)"),
        (["ddp.bucket_cap_mb=nan"], "write a number"),
        (["loader.num_workers=1.5"], "write a whole number from 0 to 1024 (processes)"),
        (["gc.every=x"], "write a whole number"),
        (["optimizer.fused=maybe"], "write true or false"),
        (["ddp.comm_hook=int8"], "write bf16 or fp16"),
        (["nothing.like_this=1"], "`dsprof knobs` lists them"),
        (["ddp.qqqqqqq=1"], "ddp has bucket_cap_mb, static_graph"),
        (["env.DSPROF_LEVEL=full"], "that steers dsprof"),
        (["ddp.bucket_cap_mb"], "write KEY=VALUE"),
        (["=3"], "write KEY=VALUE"),
        (["gc.every=1", "gc.every=2"], "given twice, as 1 and as 2"),
        (["zero_optimization.stage=7"], "zero_optimization.stage=7: write 0, 1, 2 or 3"),
        (["zero_optimization.reduce_bucket_size=0"], "write a whole number above 0"),
        (["zero_optimization.overlap_comm=maybe"], "write true or false"),
        (["zero_optimization.offload_optimizer.device=disk"], 'write "none", "cpu" or "nvme"'),
        (["zero_optimization=3"], "write an object of keys and values"),
        (["communication_data_type=bf17"], 'write "fp32", "fp16" or "bf16"'),
        (["ddp.reshard_after_forward=false"], "fsdp2.reshard_after_forward is one of fully_shard"),
        (["fsdp2.num_workers=2"], "loader.num_workers is one of DataLoader"),
        (["optimizer.fused=true", "optimizer.foreach=true"], "torch refuses an optimizer that is both; set one"),
        (["bf16.enabled=true", "fp16.enabled=true"], "a model trains in one of them"),
        (["ddp.static_graph=true", "ddp.accumulate=4"], "a static graph reduces in every backward"),
        (["zero_optimization.stage=1", "zero_optimization={}"], "the second is in the first"),
        (["env.HF_TOKEN=hunter2x1", "env.HF_TOKEN=hunter2x2"], "given twice, as [redacted] and as [redacted]"),
    ],
)
def test_what_cannot_be_says_what_to_write(words: list[str], says: str) -> None:
    with pytest.raises(KnobError) as raised:
        parse_settings(words)
    assert says in str(raised.value)


def test_a_rank_knows_each_framework_that_has_knobs() -> None:
    first = {knob.key.partition(".")[0] for knob in KNOBS}
    assert first == {*overrides.MODULES, *overrides.OF_THE_ENVIRONMENT}


def test_keys_are_there_once() -> None:
    assert len({knob.key for knob in KNOBS}) == len(KNOBS)


def test_a_run_states_what_its_knobs_were() -> None:
    facts = {
        "ddp": [{"bucket_cap_mb": 25.0, "site": "train.py:7"}, {"bucket_cap_mb": 25.0, "site": "train.py:7"}],
        "pipeline": [{"schedule": "Schedule1F1B", "microbatches": 4, "site": None}],
        "config": [{"path": "/job/ds.json", "content": {"zero_optimization": {"stage": 2}}, "site": "train.py:9"}],
    }
    assert find("ddp.bucket_cap_mb").stated(facts) == [Stated(25.0, "train.py:7")]
    assert find("pipelining.schedule").stated(facts) == [Stated("1f1b")]
    assert find("zero_optimization.stage").stated(facts) == [Stated(2, "/job/ds.json#/zero_optimization/stage")]
    assert find("zero_optimization.overlap_comm").stated(facts) == []
    assert find("loader.num_workers").stated(facts) == []
    assert [knob.key for knob in of_config(facts)] == ["zero_optimization.stage"]


def test_the_page_is_made_from_the_records() -> None:
    docs = Path(__file__).parents[1] / "docs"
    made = runpy.run_path(str(docs / "knobs_page.py"))["render"]()
    assert (docs / "knobs.md").read_text(encoding="utf-8") == made, "python docs/knobs_page.py > docs/knobs.md"
