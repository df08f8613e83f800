"""What a configuration contradicts itself in, and what has no effect in it."""

from __future__ import annotations

from typing import Any

import pytest

from dsprof.engine.config import Config, ConfigError, load
from dsprof.engine.config.cases import STAGE_1, STAGE_3
from dsprof.engine.config.rules import RULES
from dsprof.engine.config.zero import ZeroConfig

MICRO = {"train_micro_batch_size_per_gpu": 1}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
         'bf16.enabled: true, and fp16.enabled is true too; write "enabled": false in one of them'),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e6}},
         'fp16.min_loss_scale: 1e+06 is above the first scale, 2^16; write a larger "initial_scale_power"'),
        ({"data_types": {"grad_accum_dtype": "bf16"}},
         'data_types.grad_accum_dtype: "bf16" does not hold what the gradients do, which are fp32; write "fp32"'),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
         'data_types.grad_accum_dtype: "bf16" does not hold what the gradients do, which are fp16; write "fp32" or '
         '"fp16"'),
        (zero(3, zero_hpz_partition_size=4),
         "zero_optimization.zero_hpz_partition_size: 4 does not divide the 6 data-parallel ranks; write 1, 2, 3 or 6"),
        ({"sparse_gradients": True, **zero(2)},
         'sparse_gradients: true, and "zero_optimization" has "stage": 2, which shards gradients into pieces; write '
         '"stage": 0 or 1, or remove "sparse_gradients"'),
        ({"optimizer": {"type": "OneBitAdam"}, **zero(1)},
         "optimizer.type: OneBitAdam compresses whole gradients on every rank, which ZeRO shards; write "
         '"zero_optimization": {"stage": 0}, or "AdamW"'),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
         'optimizer.params.nesterov: true, and it takes a "momentum" above 0 and no "dampening"; write "momentum": '
         "0.9"),
        (zero(3, offload_param={"device": "nvme"}),
         'zero_optimization.offload_param.nvme_path: missing, and "device" is "nvme"; write a folder on the local '
         "disk"),
        (zero(1, offload_optimizer={"device": "nvme"}),
         'zero_optimization.offload_optimizer.nvme_path: missing, and "device" is "nvme"; write a folder on the local '
         "disk"),
        ({"tensor_parallel": {"autotp_size": 4}},
         "tensor_parallel.autotp_size: 4 does not divide the 6 ranks; write 1, 2, 3 or 6"),
        ({"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}},
         "pipeline.stages: 2 stages of 2 ranks each do not divide the 6 ranks; write 1 or 3"),
        ({"tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "LAMB"}},
         'optimizer.type: "Lamb" looks at whole matrices, and "autotp_size": 2 shards them; write "AdamW", "Adam", '
         '"SGD" or "Lion"'),
        ({"pipeline": {"stages": 2, "virtual_stages": 2}},
         'pipeline.virtual_stages: 2, and "1f1b" knows one stage a rank; write 1, or "schedule": "interleaved"'),
        ({"pipeline": {"partition_method": 3}},
         'pipeline.partition_method: 3 is no way to divide layers; write "parameters", "uniform", "type:REGEX", '
         '"measured", or the layers at which stages begin and end, as [0, 3, 8]'),
    ],
)  # fmt: skip
def test_contradictions(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({**MICRO, **raw}, world_size=6)
    assert caught.value.problems == [says]


@pytest.mark.parametrize(
    ("stages", "raw", "says"),
    [
        (2, {"stages": 3}, 'pipeline.stages: 3, and the PipelineModule has num_stages=2; write 2, or leave one of them '
                           "out"),
        (0, {"stages": 3}, "pipeline.stages: 3, and the model is not a pipeline; wrap it, "
                           "PipelineModule(layers, loss_fn=...), or write 1"),
    ],
)  # fmt: skip
def test_stages_that_are_not_the_models(stages: int, raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({**MICRO, "pipeline": raw}, world_size=6, pipeline_stages=stages)
    assert caught.value.problems == [says]


def test_the_model_says_how_many_stages_there_are() -> None:
    config = load({**MICRO, "gradient_accumulation_steps": 2}, world_size=6, pipeline_stages=3)
    assert (config.pipeline.stages, config.train_batch_size) == (3, 2 * 2 * config.train_micro_batch_size_per_gpu)
    (warning,) = load({**MICRO, "pipeline": {"schedule": "gpipe"}}, pipeline_stages=0).warnings
    assert warning == "pipeline.schedule: has no effect; the model is not a PipelineModule"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (zero(2, stage3_max_live_parameters=5),
         ['zero_optimization.stage3_max_live_parameters: has no effect; the stage is 2, and it takes "stage": 3']),
        (zero(0, reduce_scatter=False, round_robin_gradients=True),
         ['zero_optimization.reduce_scatter: has no effect; the stage is 0, and it takes "stage": 1 or more',
          'zero_optimization.round_robin_gradients: has no effect; the stage is 0, and it takes "stage": 1 or more']),
        (zero(2, offload_param={"device": "cpu"}),
         ['zero_optimization.offload_param: has no effect; the stage is 2, and it takes "stage": 3']),
        (zero(0, offload_optimizer={"device": "nvme"}),
         ['zero_optimization.offload_optimizer: has no effect; the stage is 0, and it takes "stage": 1 or more']),
        (zero(1, offload_optimizer={"device": "cpu", "pipeline_read": True, "nvme_path": "/x"}),
         ['zero_optimization.offload_optimizer.nvme_path: has no effect; it is for "device": "nvme", and the device is '
          '"cpu"',
          'zero_optimization.offload_optimizer.pipeline_read: has no effect; it is for "device": "nvme", and the '
          'device is "cpu"']),
        (zero(1, offload_optimizer={"device": "nvme", "nvme_path": "/x", "ratio": 0.5}),
         ['zero_optimization.offload_optimizer.ratio: has no effect; it is for "device": "cpu", and the device is '
          '"nvme"']),
        ({"aio": {"queue_depth": 32}}, ['aio.queue_depth: has no effect; nothing is offloaded to "nvme"']),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2},
         ['gradient_predivide_factor: has no effect; all of the division is done beforehand with "prescale_gradients": '
          "true"]),
        ({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}},
         ['fp16.hysteresis: has no effect; the scale is fixed; for a dynamic one write "loss_scale": 0']),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
         ["scheduler.params.total_num_steps: 10 is less than warmup_num_steps, 1000: the training ends before the "
          "warm-up does"]),
        ({"tensor_parallel": {"sequence_parallel": True}},
         ['tensor_parallel.sequence_parallel: has no effect; it takes "autotp_size" above 1']),
        ({"context_parallel": {"check": False, "order": "contiguous"}},
         ['context_parallel.order: has no effect; it takes "sequence_parallel_size" above 1',
          'context_parallel.check: has no effect; it takes "sequence_parallel_size" above 1']),
        ({"sequence_parallel_size": 2, "context_parallel": {"order": "contiguous"}},
         ['context_parallel.order: has no effect; it is for "attention": "ring"; with "ulysses" every rank has all '
          "positions of its heads"]),
        ({"pipeline": {"layer_costs": "costs.json"}},
         ['pipeline.layer_costs: has no effect; it takes "partition_method": "measured"']),
        ({"activation_checkpointing": {"every": 3}},
         ['activation_checkpointing.every: has no effect; it takes "policy": "every_k"']),
        ({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}},
         ['comms_logger.prof_ops: has no effect; to choose, write "prof_all": false too']),
        ({"fp16": {"loss_scale": 128}, "bf16": {"enabled": False, "check_grad_overflow": False}, "csv_monitor": {},
          "tensorboard": {"job_name": "a", "output_path": "b"}},
         ['fp16: has no effect; it takes "enabled": true', 'tensorboard: has no effect; it takes "enabled": true']),
    ],
)  # fmt: skip
def test_what_has_no_effect(raw: dict[str, Any], says: list[str]) -> None:
    assert load({**MICRO, **raw}, world_size=2).warnings == says


NOBODY = "no effect; there is one data-parallel rank, with nobody to send to"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (zero(1, reduce_bucket_size=5, allgather_bucket_size=5, sub_group_size=5) | {"communication_data_type": "fp32"},
         [f"zero_optimization.allgather_bucket_size, zero_optimization.reduce_bucket_size, communication_data_type: "
          f"have {NOBODY}"]),
        (zero(2, overlap_comm=True), [f"zero_optimization.overlap_comm: has {NOBODY}"]),
        (zero(3, stage3_prefetch_bucket_size=5), [f"zero_optimization.stage3_prefetch_bucket_size: has {NOBODY}"]),
        (zero(3, stage3_prefetch_bucket_size=5, offload_param={"device": "cpu"}), []),
        (zero(0, allgather_bucket_size=5),
         ['zero_optimization.allgather_bucket_size: has no effect; the stage is 0, and it takes "stage": 1 or more']),
    ],
)  # fmt: skip
def test_what_one_rank_has_no_use_for(raw: dict[str, Any], says: list[str]) -> None:
    assert load({**MICRO, **raw}).warnings == says
    assert load({**MICRO, **raw, "pipeline": {"stages": 2}}, world_size=2).warnings == says


@pytest.mark.parametrize(
    "raw",
    [
        zero(3, stage3_max_live_parameters=5, zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
        zero(2, stage3_max_live_parameters=1e9, sub_group_size=5),
        zero(1, offload_optimizer={"device": "none", "buffer_count": 9}),
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": "/x"}) | {"aio": {"queue_depth": 9}},
        zero(2, offload_param={"device": "none"}),
        zero(0) | {"optimizer": {"type": "onebitadam"}, "sparse_gradients": True},
        {"fp16": {"enabled": False, "loss_scale": 128, "hysteresis": 4, "min_loss_scale": 1e9}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"activation_checkpointing": {"policy": "every_k", "every": 3}},
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}},
        {"optimizer": {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9}}},
        {"tensor_parallel": {"autotp_size": 1}, "pipeline": {"stages": 1}},
        {"gradient_predivide_factor": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_fine_is_passed_over_in_silence(raw: dict[str, Any]) -> None:
    assert load({**MICRO, **raw}, world_size=2).warnings == []


def test_rules_speak_of_keys_there_are() -> None:
    assert set(STAGE_1) | set(STAGE_3) <= set(ZeroConfig.model_fields)
    assert {key for key in ZeroConfig.model_fields if key.startswith("stage3_")} <= set(STAGE_3)


def test_the_default_configuration_breaks_no_rule() -> None:
    config = Config(train_batch_size=1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    assert [remark for rule in RULES for remark in rule(config, 4)] == []
