"""Keys of a configuration: unknown ones, DeepSpeed's that are not ours, other names."""

from __future__ import annotations

from typing import Any

import pytest

from dsprof.engine.config import Config, ConfigError, load
from dsprof.engine.config.deepspeed_keys import FOREIGN, RENAMED, REPLACED
from dsprof.engine.config.keys import ALIASES
from dsprof.engine.config.model import sections
from dsprof.words import joined, nearest

ONE = {"train_batch_size": 1}
NOT_OURS = "DeepSpeed's key, which this engine does not have; "
OFF = "has no effect; it is off, and this engine does not have it"


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load({**ONE, **raw})
    return caught.value.problems


def warnings(raw: dict[str, Any]) -> list[str]:
    return load({**ONE, **raw}).warnings


# --- unknown --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps: unknown key; the nearest is "
         "gradient_accumulation_steps"),
        ({"FP16": {}}, "FP16: unknown key; the nearest is fp16"),
        ({"zero_optimization": {"reduce_bucket_sizes": 1}},
         "zero_optimization.reduce_bucket_sizes: unknown key; the nearest is reduce_bucket_size"),
        ({"zero_optimization": {"offload_param": {"devices": "cpu"}}},
         "zero_optimization.offload_param.devices: unknown key; the nearest is device"),
        ({"zero_optimization": {"use_multi_rank_bucket_allreduces": True}},
         "zero_optimization.use_multi_rank_bucket_allreduces: unknown key; the nearest is "
         "use_multi_rank_bucket_allreduce, which DeepSpeed has and this engine has not"),
        ({"aio": {1: 2}}, "aio.1: unknown key, and none here is like it; the keys are block_size, queue_depth, "
         "intra_op_parallelism"),
        ({"moe": {}}, "moe: unknown key, and none here is like it; docs/engine-config.md has all keys"),
        ({"learning_rate": 1}, "learning_rate: unknown key; lr is of optimizer.params; move it there"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}},
         "optimizer.params.learning_rate: unknown key; the nearest is lr"),
        ({"optimizer": {"type": "Adam", "params": {"wd": 1}}},
         "optimizer.params.wd: unknown key; the nearest is weight_decay"),
        ({"reduce_bucket_size": 1}, "reduce_bucket_size: not a key here but of zero_optimization; move it there"),
        ({"lr": 1}, "lr: not a key here but of optimizer.params; move it there"),
        ({"bf16": {"loss_scale": 1}}, "bf16.loss_scale: not a key here but of fp16; move it there"),
        ({"fp16": {"gradient_clipping": 1}}, "fp16.gradient_clipping: not a key here but of the top; move it there"),
        ({"zero_optimization": {"nvme_path": "/x"}},
         "zero_optimization.nvme_path: not a key here but of zero_optimization.offload_param and of "
         "zero_optimization.offload_optimizer; move it there"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_an_error_that_names_the_nearest(raw: dict[str, Any], says: str) -> None:
    assert problems(raw) == [says]


def test_the_nearest_is_the_most_alike_whatever_its_case() -> None:
    assert nearest("Momentun", ["momentum", "moment", "lr"]) == "momentum"
    assert nearest("Wd", ["adam_w_mode", "weight_decay"], meanings=ALIASES) == "weight_decay"
    assert nearest("one", ["Oned", "oned"]) == "Oned"
    assert nearest("zzz", ["first", "second"]) is None
    assert nearest("zzz", []) is None


# --- DeepSpeed's ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"compression_training": {"weight_quantization": {}}},
         f"compression_training: {NOT_OURS}quantize or prune the model itself; DeepSpeed has removed it too"),
        ({"wandb": {"enabled": True}},
         f'wandb: {NOT_OURS}write "tensorboard", which `wandb.init(sync_tensorboard=True)` passes on, or '
         '"csv_monitor"'),
        ({"compile": {"deepcompile": True}}, f"compile: {NOT_OURS}pass `torch.compile(model)` to `initialize`"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
         f"zero_optimization.zero_quantized_nontrainable_weights: {NOT_OURS}quantize frozen weights in the model "
         "itself"),
        ({"bf16": {"bf16_optimizer_states": True}},
         f"bf16.bf16_optimizer_states: {NOT_OURS}optimizer states are kept in fp32"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}},
         f'tensor_parallel.tp: {NOT_OURS}write "autotp_size": 2 instead of "tp": {{"tp_size": 2}}'),
    ],
)  # fmt: skip
def test_what_would_not_be_what_was_asked_for_is_refused(raw: dict[str, Any], says: str) -> None:
    assert problems(raw) == [says]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"amp": {"enabled": False, "opt_level": "O1"}}, f"amp: {OFF}"),
        ({"elasticity": {}}, f"elasticity: {OFF}"),
        ({"compile": {"deepcompile": False}}, f"compile: {OFF}"),
        ({"zero_optimization": {"zenflow": False}}, f"zero_optimization.zenflow: {OFF}"),
        ({"zero_optimization": {"mics_shard_size": -1}}, f"zero_optimization.mics_shard_size: {OFF}"),
        ({"managed_gradient_accumulation": True}, f"managed_gradient_accumulation: {OFF}"),
        ({"optimizer": {"type": "Lion", "params": {"bias_correction": True}}},
         f"optimizer.params.bias_correction: {OFF}"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
         "optimizer.params.torch_adam: has no effect; torch's implementation is always used, and weight_decay is 0 "
         "unless it is given"),
        ({"activation_checkpointing": {"partition_activations": True}},
         "activation_checkpointing.partition_activations: has no effect; without tensor parallelism each rank has "
         "activations of its own"),
        ({"disable_allgather": True},
         'disable_allgather: has no effect; it has none in DeepSpeed either; for broadcasts write "zero_optimization": '
         '{"allgather_partitions": false}'),
    ],
)  # fmt: skip
def test_what_is_off_or_has_no_effect_is_a_warning(raw: dict[str, Any], says: str) -> None:
    assert warnings(raw) == [says]


def test_every_foreign_key_is_told_of_wherever_it_stands() -> None:
    """No key of DeepSpeed's passes in silence, and none of them is a key of ours in every section of that name."""
    own = {path: [section for where, section in sections(Config) if where == path] for path in FOREIGN}
    told = 0
    for where, keys in FOREIGN.items():
        for key, foreign in keys.items():
            without = [section for section in own[where] if key not in section.model_fields]
            assert without, joined(where, key)
            told += foreign.says != ""
    assert told == sum(map(len, FOREIGN.values())) > 90


# --- other names ----------------------------------------------------------------------------------


def test_other_names_work() -> None:
    config = load(
        {
            "train_batch_size": 1,
            "bfloat16": {"enabled": True},
            "aio": {"thread_count": 3},
            "zero_optimization": {
                "stage": 3,
                "prefetch_bucket_size": 7,
                "stage3_gather_fp16_weights_on_model_save": True,
                "cpu_offload": True,
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
            },
        }
    )
    zero = config.zero_optimization
    assert config.bf16.enabled
    assert config.aio.intra_op_parallelism == 3
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_gather_16bit_weights_on_model_save) == (7, True)
    assert zero.offload_optimizer is not None
    assert zero.offload_optimizer.device == "cpu"
    assert config.warnings == [
        "bfloat16: is another name of bf16; write that",
        "aio.thread_count: is another name of intra_op_parallelism; write that",
        "zero_optimization.prefetch_bucket_size: is another name of stage3_prefetch_bucket_size; write that",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save: is another name of "
        "stage3_gather_16bit_weights_on_model_save; write that",
        'zero_optimization.cpu_offload: is an old way to write "offload_optimizer": {"device": "cpu"}; write that',
    ]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: is another name of bf16, which is given too; remove it"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
         'zero_optimization.cpu_offload: means "offload_optimizer": {"device": "cpu"}, and offload_optimizer is given '
         "too; remove zero_optimization.cpu_offload"),
        ({"zero_optimization": {"cpu_offload": "yes"}},
         'zero_optimization.cpu_offload: "yes" is not true or false; write "offload_optimizer": {"device": "cpu"} '
         "instead"),
    ],
)  # fmt: skip
def test_other_names_that_contradict(raw: dict[str, Any], says: str) -> None:
    assert problems(raw)[0] == says


def test_old_switches() -> None:
    assert warnings({"zero_optimization": {"stage": 1, "cpu_offload": False}}) == [
        'zero_optimization.cpu_offload: is an old way to write "offload_optimizer": {"device": "cpu"}, and is off; '
        "remove it"
    ]
    config = load({**ONE, "zero_optimization": True})
    assert config.zero_optimization.stage == 1
    assert config.warnings == ['zero_optimization: is an old way to write {"stage": 1}; write that']


def test_other_names_lead_to_keys_there_are() -> None:
    for where, names in [*RENAMED.items(), *REPLACED.items()]:
        fields = {key for path, section in sections(Config) if path == where for key in section.model_fields}
        assert set(names.values()) <= fields, where
        assert not set(names) & fields, where
