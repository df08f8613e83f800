"""Reading a configuration: files, values, and what is said of those that cannot be taken."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dsprof.engine.config import Config, ConfigError, load
from dsprof.engine.config.model import Section, TorchParams, sections
from dsprof.engine.config.optimizer import OPTIMIZERS
from dsprof.engine.config.scheduler import SCHEDULERS
from dsprof.engine.config.zero import ZeroConfig
from dsprof.words import joined

ONE = {"train_batch_size": 1}
AUTO = '"auto" is for Hugging Face\'s Trainer to fill in; write'
TOO_LARGE = '"1e999999999" is too large; the largest number that can be written is 9223372036854775807'


def refused(source: Any, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(source, world_size=world_size)
    return str(caught.value).splitlines()


def with_key(path: str, value: Any) -> dict[str, Any]:
    """A configuration with one key, such as `zero_optimization.stage`, and what it needs around it."""
    *names, last = path.split(".")
    raw: dict[str, Any] = {"train_batch_size": 1}
    place = raw
    for name in names:
        place = place.setdefault(name, {})
    place[last] = value
    return raw


# --- what can be taken ----------------------------------------------------------------------------


def test_the_defaults_are_those_of_deepspeed() -> None:
    config = load({"train_batch_size": 8, "zero_optimization": {"stage": 2}}, world_size=2)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert config.gradient_accumulation_steps == 1
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    assert config.optimizer is None
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (2, 500_000_000, 500_000_000)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (50_000_000, 100_000)
    assert (zero.sub_group_size, zero.zero_hpz_partition_size) == (1_000_000_000, 1)
    assert (zero.offload_param, zero.offload_optimizer) == (None, None)
    assert config.fp16.model_dump() == {
        "enabled": False, "auto_cast": False, "loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1.0,
    }  # fmt: skip
    assert config.warnings == []


@pytest.mark.parametrize(
    ("given", "overlaps"),
    [
        ({"stage": 0}, False),
        ({"stage": 2}, False),
        ({"stage": 3}, True),
        ({"stage": "3"}, True),
        ({"stage": 3, "overlap_comm": False}, False),
        ({"stage": 1, "overlap_comm": True}, True),
    ],
)
def test_overlap_follows_the_stage_unless_it_is_given(given: dict[str, Any], overlaps: bool) -> None:
    assert ZeroConfig(**given).overlap_comm is overlaps
    assert load({**ONE, "zero_optimization": given}).zero_optimization.overlap_comm is overlaps


@pytest.mark.parametrize("written", [500_000_000, 5e8, "5e8", "500000000"], ids=str)
def test_sizes_in_scientific_notation(written: object) -> None:
    config = load({**ONE, "zero_optimization": {"reduce_bucket_size": written}})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int


def test_a_tutorial_s_configuration() -> None:
    config = load(
        {
            "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10,
            "optimizer": {"type": "ADAMW", "params": {"lr": "3e-4", "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "warmupcosinelr", "params": {"total_num_steps": 1e4, "warmup_num_steps": 100}},
            "bfloat16": {"enabled": True}, "gradient_clipping": 0.5,
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": None},
            },
            "data_types": {"grad_accum_dtype": "float32"}, "communication_data_type": "torch.bfloat16",
            "checkpoint": {"tag_validation": "FAIL"},
        },
        world_size=8,
    )  # fmt: skip
    assert config.gradient_accumulation_steps == 4
    assert config.optimizer is not None
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params.arguments() == {
        "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True, "amsgrad": False,
    }  # fmt: skip
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupCosineLR"
    assert config.scheduler.params.arguments() == {
        "total_num_steps": 10_000, "warmup_min_ratio": 0.0, "warmup_num_steps": 100, "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    }  # fmt: skip
    assert config.bf16.enabled
    assert config.data_types.grad_accum_dtype == "fp32"
    assert config.communication_data_type == "bf16"
    assert config.checkpoint.tag_validation == "Fail"
    assert config.zero_optimization.offload_param is not None
    assert config.zero_optimization.offload_param.device == "none"
    assert config.warnings == ["bfloat16: is another name of bf16; write that"]


def test_a_configuration_cannot_be_changed_in_passing() -> None:
    config = load(ONE)
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 3


def test_warnings_belong_to_one_configuration() -> None:
    assert load({**ONE, "log_level": "info"}).warnings == ["log_level: has no effect; it says what DeepSpeed logs"]
    assert load(ONE).warnings == []


def test_the_effective_configuration_can_be_loaded_again() -> None:
    config = load(
        {
            "train_batch_size": 4,
            "optimizer": {"type": "SGD"},
            "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}},
        }
    )
    written = json.loads(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    again = load(written)
    assert again.model_dump() == config.model_dump()
    assert again.warnings == []


@pytest.mark.parametrize(("names", "home"), [(SCHEDULERS, torch.optim.lr_scheduler), (OPTIMIZERS, torch.optim)])
def test_parameters_of_torch_s_own_are_torch_s(names: dict[str, type[Section]], home: Any) -> None:
    borrowed = {name: params for name, params in names.items() if issubclass(params, TorchParams)}
    assert len(borrowed) >= 8
    for name, params in borrowed.items():
        assert set(params.model_fields) <= set(inspect.signature(getattr(home, name)).parameters), name


def test_parameters_of_torch_s_own_are_passed_on_as_given() -> None:
    config = load({**ONE, "scheduler": {"type": "cosineannealinglr", "params": {"T_max": 10}}})
    assert config.scheduler is not None
    assert config.scheduler.params.arguments() == {"T_max": 10}


def test_rates_for_each_parameter_group() -> None:
    params = {"warmup_min_lr": [0, 1e-5], "warmup_max_lr": 1}
    config = load({**ONE, "scheduler": {"type": "WarmupLR", "params": params}})
    assert config.scheduler is not None
    arguments = config.scheduler.params.arguments()
    assert (arguments["warmup_min_lr"], arguments["warmup_max_lr"]) == ((0.0, 1e-5), 1.0)


# --- files ----------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"train_batch_size": 4}', encoding="utf-8")
    assert load(path).train_batch_size == 4
    assert load(str(path)).train_batch_size == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1, column 1: the file is empty; write an object of keys and values"),
        ('{"a": 1,\n}', "line {}: a comma too many; remove it"),
        (
            '{\n  "a": 1 // one\n}',
            "line 2, column 10: JSON has no comments; remove it",
        ),
        ("{'a': 1}", "line 1, column 2: strings take double quotes"),
        ('{"a": True}', "line 1, column 7: True is Python; write true"),
        ('{"a": None}', "line 1, column 7: None is Python; write null"),
        ('{"a": 1 "b": 2}', "line 1, column 9: not JSON: expecting ',' delimiter"),
        ("[1]", "[1] is not a configuration; write an object of keys and values"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "enabled: written twice in one object; remove one of them"),
        ("[" * 100_000, "nested too deeply to be a configuration"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    places = ("1, column 8", "2, column 1")  # Python 3.13 points at the comma, 3.11 at what follows it
    (line,) = refused(path)
    assert line in [f"{path}: {says.format(place)}" for place in places]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone.json") == [
        f"{tmp_path / 'gone.json'}: no such file; name the JSON file of the configuration"
    ]
    assert refused(tmp_path) == [f"{tmp_path}: is a folder; name the JSON file of the configuration"]
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"a": "\xe9"}')
    assert refused(latin) == [f"{latin}: byte 7 is not UTF-8; save it as UTF-8"]


def test_every_line_of_a_file_s_errors_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_sise": 4, "fp16": {"loss_scale": -1}}')
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.problems == [
        "train_batch_sise: unknown key; the nearest is train_batch_size",
        "fp16.loss_scale: -1 is not a number at least 0; the default is 0.0",
        'train_batch_size: missing; write "train_micro_batch_size_per_gpu", the samples of a GPU in one forward pass',
    ]
    assert str(caught.value) == "\n".join(f"{path}: {problem}" for problem in caught.value.problems)


def test_errors_survive_the_way_from_another_process(tmp_path: Path) -> None:
    error = ConfigError(["a: wrong", "b: wrong"], ["c: odd"], tmp_path)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, again.warnings) == (str(error), ["a: wrong", "b: wrong"], ["c: odd"])


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("zero_optimization.stage", 4, "4 is not 0, 1, 2 or 3; the default is 0"),
        ("zero_optimization.stage", "two", '"two" is not 0, 1, 2 or 3; the default is 0'),
        ("zero_optimization.reduce_bucket_size", "2MB",
         '"2MB" is not a whole number above 0; the default is 500000000'),
        ("zero_optimization.reduce_bucket_size", 0, "0 is not a whole number above 0; the default is 500000000"),
        ("zero_optimization.reduce_bucket_size", -5, "-5 is not a whole number above 0; the default is 500000000"),
        ("zero_optimization.reduce_bucket_size", 1.5, "1.5 is not a whole number above 0; the default is 500000000"),
        ("zero_optimization.reduce_bucket_size", True, "true is not a whole number above 0; the default is 500000000"),
        ("zero_optimization.reduce_bucket_size", None, "null is not a whole number above 0; the default is 500000000"),
        ("zero_optimization.reduce_bucket_size", "1e999999999", TOO_LARGE),
        ("zero_optimization.reduce_bucket_size", "auto", f"{AUTO} a whole number above 0; the default is 500000000"),
        ("zero_optimization.overlap_comm", "maybe", '"maybe" is not true or false'),
        ("zero_optimization.offload_optimizer", "cpu", '"cpu" is not an object of keys and values'),
        ("zero_optimization.offload_optimizer.device", "gpu",
         '"gpu" is not "none", "cpu" or "nvme"; the default is "none"'),
        ("zero_optimization.offload_optimizer.ratio", 1.5,
         "1.5 is not a number at least 0 and at most 1; the default is 1.0"),
        ("zero_optimization.offload_param.nvme_path", 1, "1 is not a path"),
        ("bf16.enabled", "auto", f"{AUTO} true or false; the default is false"),
        ("fp16", 16, "16 is not an object of keys and values"),
        ("fp16.loss_scale", float("inf"), "Infinity is not a number at least 0; the default is 0.0"),
        ("gradient_clipping", "1.0.0", '"1.0.0" is not a number at least 0; the default is 1.0'),
        ("communication_data_type", "int8", '"int8" is not "fp32", "fp16" or "bf16"'),
        ("aio.block_size", 1000,
         "1000 is not a whole number at least 512 and a multiple of 512; the default is 1048576"),
        ("steps_per_print", 0, "0 is not a whole number above 0"),
        ("comms_logger.prof_ops", "all_reduce", '"all_reduce" is not a list of strings; the default is []'),
        ("comms_logger.prof_ops", [1], "[1] is not a list of strings; the default is []"),
        ("flops_profiler.output_file", 1, "1 is not a string"),
        ("checkpoint.tag_validation", "never", '"never" is not "Ignore", "Warn" or "Fail"; the default is "Warn"'),
    ],
)  # fmt: skip
def test_values_that_cannot_be_taken(path: str, value: object, says: str) -> None:
    assert refused(with_key(path, value)) == [f"{path}: {says}"]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"params": {"lr": 1}}, 'type: missing, and it has no default; write a string, such as "AdamW"'),
        ({"type": "AdamV"},
         'type: "AdamV" is not an optimizer of this engine: they are Adam, AdamW, SGD, Lion, Lamb, Muon, OneBitAdam, '
         "Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop; write one of them, or "
         "pass the optimizer itself to `initialize(optimizer=...)`; did you mean 'Adam'?"),
        ({"type": "AdamW", "params": {"lr": "auto"}}, f"params.lr: {AUTO} a number at least 0; the default is 0.001"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.0]}},
         "params.betas: [0.9, 1.0] is not two numbers, each at least 0 and below 1; the default is [0.9, 0.999]"),
        ({"type": "AdamW", "params": {"betas": "auto"}},
         f"params.betas: {AUTO} two numbers, each at least 0 and below 1; the default is [0.9, 0.999]"),
        ({"type": "SGD", "params": {"momentun": 1}}, "params.momentun: unknown key; the nearest is momentum"),
        ({"type": "Rprop", "params": {"stepsizes": 1}}, "params.stepsizes: unknown key; the nearest is step_sizes"),
        ({"type": "AdamW", "params": [1e-3]}, "params: [0.001] is not an object of keys and values"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1}},
         "params.max_grad_norm: DeepSpeed's key, which this engine does not have; write "
         '"gradient_clipping" at the top'),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_be_taken(section: dict[str, Any], says: str) -> None:
    assert refused({**ONE, "optimizer": section}) == [f"optimizer.{says}"]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"type": "WarmupDecayLR"},
         "params.total_num_steps: missing, and it has no default; write a whole number at least 1"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
         f"params.total_num_steps: {AUTO} a whole number at least 1"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": "auto"}},
         f"params.cycle_max_lr: {AUTO} a number at least 0, or a list with one for each parameter group"),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [0, -1]}},
         "params.warmup_min_lr: [0, -1] is not a number at least 0, or a list with one for each parameter group; the "
         "default is 0.0"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "x"}},
         'params.warmup_max_lr: "x" is not a number at least 0, or a list with one for each parameter group'),
        ({"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
         'params.warmup_type: "cosine" is not "log" or "linear"; the default is "log"'),
        ({"type": "WarmUp"},
         'type: "WarmUp" is not a schedule that a configuration can describe: they are WarmupLR, WarmupDecayLR, '
         "WarmupCosineLR, OneCycle, LRRangeTest, ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, "
         "ExponentialLR, LinearLR, MultiStepLR, OneCycleLR, PolynomialLR, StepLR; write "
         "one of them, or pass the schedule itself to `initialize(lr_scheduler=...)`; did you mean 'WarmupLR'?"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_taken(section: dict[str, Any], says: str) -> None:
    assert refused({**ONE, "scheduler": section}) == [f"scheduler.{says}"]


def test_one_wrong_value_does_not_hide_the_others() -> None:
    raw = {
        "train_batch_size": 6, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": -1,
        "optimizer": {"params": {"lr": 1e-3}}, "fp16": {"enabled": True}, "bf16": {"enabled": True, "nonsense": 1},
    }  # fmt: skip
    assert refused(raw) == [
        "bf16.nonsense: unknown key, and none here is like it; the keys are enabled, check_grad_overflow",
        'optimizer.type: missing, and it has no default; write a string, such as "AdamW"',
        "gradient_clipping: -1 is not a number at least 0; the default is 1.0",
        'bf16.enabled: true, and fp16.enabled is true too; write "enabled": false in one of them',
        "train_batch_size: 6 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 (derived) x "
        '1 data-parallel rank = 4; write "train_batch_size": 4 or "train_micro_batch_size_per_gpu": 6',
    ]


def test_a_batch_size_that_cannot_be_taken_is_not_called_missing() -> None:
    assert refused({"train_batch_size": "auto"}) == [f"train_batch_size: {AUTO} a whole number above 0"]


# --- nothing of pydantic's reaches the user ---------------------------------------------------------

JUNK: list[Any] = [
    None, True, -1, 0, 0.5, 1e30, float("nan"), "x", "auto", "", [], [1, 2, 3], ["x"], {}, {"x": 1}, {1: 2},
]  # fmt: skip
PYDANTIC = (
    "Input should", "pydantic", "validation error", "type=", "[type", "Value error", "Field required", "Extra inputs",
)  # fmt: skip
KEYS = [(joined(where, key), section) for where, section in sections(Config) for key in section.model_fields]


def raw_with(path: str, section: type[Section], value: Any) -> dict[str, Any]:
    """A configuration in which `path` leads into that very section."""
    raw = with_key(path, value)
    for name, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if path.startswith(f"{name}.params."):
            raw[name]["type"] = next(key for key, params in types.items() if params is section)
    return raw


def problems_of(raw: dict[str, Any]) -> list[str]:
    try:
        load(raw)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(("path", "section"), KEYS, ids=[f"{path}-{section.__name__}" for path, section in KEYS])
def test_junk_is_taken_or_complained_of_in_our_words(path: str, section: type[Section]) -> None:
    about = 0
    for value in JUNK:
        for problem in problems_of(raw_with(path, section, value)):
            assert not [words for words in PYDANTIC if words in problem], problem
            about += problem.startswith(path)
    assert about > 0 or issubclass(section, TorchParams)
