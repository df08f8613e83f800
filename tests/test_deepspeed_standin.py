"""The stand-in for DeepSpeed: what it has, and what it says of the rest.

The imports were held against DeepSpeed 0.19.8, where each of them works.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dsprof.collectors.bootstrap.sitecustomize import StandIn
from dsprof.engine.config import ConfigError
from dsprof.engine.deepspeed import names
from dsprof.engine.deepspeed.zero import DESCRIPTIONS

IMPORTS = """\
import deepspeed.comm as dist
from deepspeed import comm as dist
from deepspeed import zero
from deepspeed import DeepSpeedEngine, PipelineEngine, DeepSpeedConfig, PipelineModule
from deepspeed import get_accelerator, init_distributed, initialize, add_config_arguments, log_dist, logger
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm.comm import init_distributed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, configure
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from deepspeed.runtime.utils import see_memory_usage, set_random_seed
from deepspeed.runtime.zero import GatheredParameters, Init
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from deepspeed.utils import RepeatingLoader, log_dist, logger
from deepspeed.utils.logging import logger
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.utils import move_to_device
from deepspeed.runtime.zero.partition_parameters import zero_wrapper_for_fp_tensor_constructor
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_full_grad
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.utils import groups, OnDevice, get_data_parallel_group, set_z3_leaf_modules
from deepspeed.utils.groups import _get_data_parallel_group, _get_data_parallel_world_size, get_model_parallel_rank
from deepspeed.utils.z3_leaf_module import get_z3_leaf_modules, z3_leaf_module
from deepspeed import OnDevice
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint
deepspeed.zero.Init, deepspeed.zero.GatheredParameters, deepspeed.zero.register_external_parameter
deepspeed.checkpointing.checkpoint, deepspeed.checkpointing.configure, deepspeed.checkpointing.is_configured
deepspeed.comm.all_reduce, deepspeed.comm.ReduceOp.SUM, deepspeed.comm.get_local_rank, deepspeed.comm.log_summary
deepspeed.runtime.utils.set_random_seed, deepspeed.ops.adam.FusedAdam, deepspeed.pipe.LayerSpec
deepspeed.tp_model_init, deepspeed.__version__, deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT
""".splitlines()


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, in this process for as long as the test takes."""
    monkeypatch.setattr(sys, "meta_path", [StandIn(), *sys.meta_path])
    assert "deepspeed" not in sys.modules
    try:
        yield importlib.import_module("deepspeed")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
        for name in DESCRIPTIONS:
            delattr(nn.Parameter, name)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of this one process, ended afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# --- what there is


@pytest.mark.parametrize("statement", IMPORTS)
def test_what_tutorials_import_is_there(deepspeed: ModuleType, statement: str) -> None:
    exec(statement, {"deepspeed": deepspeed})


def test_every_name_of_the_table_has_something_behind_it(deepspeed: ModuleType) -> None:
    for module, offered in names.MODULES.items():
        imported = importlib.import_module(module)
        assert imported.__name__ == module
        assert set(offered) <= set(dir(imported))
        for name in offered:
            assert getattr(imported, name) is not None
        exec(f"from {module} import *", {})


def test_a_module_is_an_attribute_of_the_one_above_without_an_import(deepspeed: ModuleType) -> None:
    for module in names.MODULES:
        found: Any = deepspeed
        for word in module.split(".")[1:]:
            found = getattr(found, word)
        assert found.__name__ == module


def test_the_names_are_the_engines_own(deepspeed: ModuleType) -> None:
    from dsprof import engine

    assert deepspeed.init_distributed is engine.init_distributed
    assert issubclass(engine.Engine, deepspeed.DeepSpeedEngine)
    assert issubclass(engine.PipelineEngine, deepspeed.DeepSpeedEngine)
    assert deepspeed.DeepSpeedConfigError is ConfigError
    assert deepspeed.comm.all_reduce is dist.all_reduce
    assert deepspeed.zero.GatheredParameters is engine.zero.GatheredParameters


def test_the_version_is_deepspeeds_and_says_whose_it_is(deepspeed: ModuleType) -> None:
    assert deepspeed.__version__ == "0.19.8+dsprof"
    version = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert version == (0, 19, 8)


def test_libraries_find_it_installed(deepspeed: ModuleType) -> None:
    """Transformers and Accelerate look there, and not for the module alone."""
    assert importlib.metadata.version("deepspeed") == importlib.metadata.version("DeepSpeed") == deepspeed.__version__
    assert importlib.metadata.metadata("deepspeed")["Summary"] == "dsprof's training engine under DeepSpeed's names"
    assert importlib.metadata.version("torch") == torch.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed-mii")


def test_where_it_is_not_asked_for_nothing_says_it_is_installed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("deepspeed")


# --- what there is not


@pytest.mark.parametrize(
    ("statement", "name", "says"),
    [
        ("deepspeed.init_inference", "deepspeed.init_inference", "the engine trains and does not serve"),
        ("from deepspeed import init_inference", "deepspeed.init_inference", "the engine trains and does not serve"),
        ("from deepspeed.moe.layer import MoE", "deepspeed.moe", "write the layer with torch.nn"),
        ("deepspeed.moe.layer.MoE", "deepspeed.moe", "write the layer with torch.nn"),
        ("from deepspeed.runtime.pipe.topology import PipelineParallelGrid", "PipelineParallelGrid", "engine.grid"),
        ("deepspeed.utils.groups._get_expert_parallel_group", "_get_expert_parallel_group", "with torch.nn"),
        ("import deepspeed.checkpoint.ds_to_universal", "deepspeed.checkpoint.ds_to_universal", "any number of ranks"),
        ("from deepspeed.ops.op_builder import CPUAdamBuilder", "deepspeed.ops.op_builder", "leave it out"),
        ("from deepspeed.launcher.runner import main", "deepspeed.launcher", "dsprof run --engine dsprof --num_gpus N"),
        ("deepspeed.get_accelerator().create_op_builder", "create_op_builder", "builds no kernels"),
        ("deepspeed.nonsense", "deepspeed.nonsense", "without --engine dsprof"),
        ("from deepspeed import nonsense", "deepspeed.nonsense", "without --engine dsprof"),
        ("import deepspeed.pipe.nonsense", "deepspeed.pipe.nonsense", "without --engine dsprof"),
    ],
)
def test_the_rest_is_refused_with_what_to_write(deepspeed: ModuleType, statement: str, name: str, says: str) -> None:
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {"deepspeed": deepspeed})
    text = str(caught.value)
    assert f"{name}: dsprof's engine, which stands in for DeepSpeed, does not have it: " in text
    assert says in text


def test_scripts_may_ask_whether_it_is_there(deepspeed: ModuleType) -> None:
    assert importlib.util.find_spec("deepspeed") is not None
    assert not hasattr(deepspeed, "init_inference")
    assert not hasattr(deepspeed, "inference")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.moe")


def test_nothing_is_both_there_and_not() -> None:
    assert not {f"deepspeed.{name}" for name in names.ABSENT_MODULES} & names.MODULES.keys()
    comm = names.MODULES["deepspeed.checkpointing"]
    offered = {name for module, of_it in names.MODULES.items() for name in of_it if of_it is not comm}
    assert not names.ABSENT_NAMES.keys() & offered - {"configure"}, "configure is checkpointing's, and not comm's"
    assert all(
        text and not text.endswith(".") for text in (*names.ABSENT_MODULES.values(), *names.ABSENT_NAMES.values())
    )


# --- what some of it does


def test_adam_is_torchs_adamw(deepspeed: ModuleType) -> None:
    weight = nn.Parameter(torch.zeros(3))
    made = deepspeed.ops.adam.FusedAdam([{"params": [weight], "weight_decay": 0.1}], lr=0.2, betas=(0.9, 0.95))
    assert type(made) is torch.optim.AdamW
    (group,) = made.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"], group["fused"]) == (0.2, (0.9, 0.95), 0.1, True)
    assert type(deepspeed.ops.adam.DeepSpeedCPUAdam([weight], adamw_mode=False)) is torch.optim.Adam
    assert type(deepspeed.ops.lion.FusedLion([weight])).__name__ == "Lion"
    assert type(deepspeed.ops.lamb.FusedLamb([weight])).__name__ == "Lamb"
    assert type(deepspeed.ops.adagrad.DeepSpeedCPUAdagrad([weight])) is torch.optim.Adagrad


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("FusedAdam", {"amsgrad": True}, "FusedAdam: the engine has no other way with amsgrad"),
        ("FusedAdam", {"set_grad_none": False}, "set_grad_none"),
        ("DeepSpeedCPUAdam", {"fp32_optimizer_states": False}, "fp32_optimizer_states"),
        ("FusedLamb", {"max_grad_norm": 1.0}, "gradient_clipping"),
    ],
)
def test_options_that_do_nothing_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    from dsprof.engine.deepspeed import optimizers

    with pytest.raises(ValueError, match=says):
        getattr(optimizers, name)([nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says of a CPU")
def test_the_accelerator_of_a_cpu(deepspeed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    cpu = deepspeed.get_accelerator()
    assert cpu is deepspeed.accelerator.get_accelerator()
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (cpu.current_device(), cpu.communication_backend_name(), cpu.is_available()) == (3, "gloo", True)
    assert cpu.on_accelerator(torch.zeros(1))
    assert 0 < cpu.memory_allocated() < cpu.total_memory()
    assert 0 < cpu.max_memory_allocated() < cpu.total_memory()
    assert cpu.Event is None
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with cpu.device(0), cpu.stream(cpu.current_stream()):
        cpu.synchronize()


def test_messages_come_from_the_ranks_that_are_named(deepspeed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    from dsprof.engine.deepspeed import utils

    utils.print_dist("without a job every process says it")
    assert capsys.readouterr().out == "[Rank -1] without a job every process says it\n"
    assert deepspeed.utils.logger.name == "DeepSpeed"
    assert not deepspeed.utils.logger.isEnabledFor(20)


def test_memory_is_told_when_it_is_asked_for(deepspeed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed.runtime.utils.see_memory_usage("before")
    assert capsys.readouterr().out == ""
    deepspeed.runtime.utils.see_memory_usage("after", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after"
    assert lines[1].startswith("MA ")
    assert lines[2].startswith("CPU Virtual Memory:  used = ")


def test_seeds_are_those_of_all_generators(deepspeed: ModuleType) -> None:
    import random

    def draw() -> tuple[float, float]:
        deepspeed.runtime.utils.set_random_seed(5)
        return random.random(), torch.rand(()).item()

    assert draw() == draw()


def test_copies_to_be_saved_keep_ties_and_kinds(deepspeed: ModuleType) -> None:
    whole = torch.arange(6.0)
    state = {"a": whole[:2], "b": whole[:2], "c": [whole[2:], 3]}
    copy = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(state)
    assert copy["a"] is copy["b"]
    assert copy["a"].untyped_storage().nbytes() == 8
    assert (copy["a"].tolist(), copy["c"][0].tolist(), copy["c"][1]) == ([0, 1], [2, 3, 4, 5], 3)
    moved = deepspeed.runtime.utils.move_to_device(state, "meta", lambda item: item.numel() > 2)
    assert (moved["a"].device.type, moved["c"][0].device.type) == ("cpu", "meta")


def test_a_parameter_that_is_whole_is_described_as_no_other(deepspeed: ModuleType) -> None:
    weight = nn.Parameter(torch.zeros(3))
    assert not any(hasattr(weight, name) for name in DESCRIPTIONS)
    deepspeed.zero.register_external_parameter(nn.Linear(1, 1), weight)
    with pytest.raises(TypeError, match="takes a module and a parameter"):
        deepspeed.zero.register_external_parameter(weight, weight)


SMALL: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}


@pytest.mark.usefixtures("alone")
def test_a_script_of_one_process_trains(deepspeed: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SMALL))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert type(optimizer) is torch.optim.AdamW
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    assert not torch.equal(model.weight, before)
    engine.destroy()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("config", "size", "dtype", "says"),
    [
        (
            {"tensor_parallel": {"autotp_size": 2}},
            4,
            torch.float32,
            "tp_size=4, and the configuration has tensor_parallel.autotp_size = 2",
        ),
        ({"bf16": {"enabled": True}}, 1, torch.float32, "dtype=torch.float32, and the .* asks for torch.bfloat16"),
        ({}, 1, torch.bfloat16, "dtype=torch.bfloat16, and the configuration asks for torch.float32"),
    ],
)
def test_tp_model_init_must_agree_with_the_configuration(
    deepspeed: ModuleType, config: dict[str, Any], size: int, dtype: torch.dtype, says: str
) -> None:
    model = deepspeed.tp_model_init(nn.Linear(4, 4), size, dtype)
    with pytest.raises(ValueError, match=says):
        deepspeed.initialize(model=model, config={**SMALL, **config})


@pytest.mark.usefixtures("alone")
def test_tp_model_init_goes_into_the_configuration(deepspeed: ModuleType) -> None:
    model = deepspeed.tp_model_init(nn.Linear(4, 4), tp_size=2, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"tensor_parallel\.autotp_size"):  # of one rank
        deepspeed.initialize(model=model, config=SMALL)
    with pytest.raises(ValueError, match=r"tp_size=2, and the configuration has tensor_parallel.autotp_size = 4"):
        deepspeed.tp_model_init(model, 2, torch.float32, config={"tensor_parallel": {"autotp_size": 4}})


@pytest.mark.usefixtures("alone")
def test_an_mpu_of_sequences_is_refused(deepspeed: ModuleType) -> None:
    mpu = argparse.Namespace(get_sequence_parallel_world_size=lambda: 2)
    with pytest.raises(ValueError, match=r"mpu \(Namespace\) has no get_model_parallel_world_size\(\).* leave it out"):
        deepspeed.initialize(model=nn.Linear(4, 4), config=SMALL, mpu=mpu)
    with pytest.raises(ValueError, match=r"set_autotp_mode: .*write training=True, or leave it out"):
        deepspeed.module_inject.set_autotp_mode()


@pytest.mark.usefixtures("alone")
def test_what_libraries_ask_an_engine(deepspeed: ModuleType) -> None:
    model = nn.Linear(4, 1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config_params={**SMALL, "steps_per_print": float("inf")}
    )
    assert engine.config["zero_optimization"]["stage"] == engine.config.get("zero_optimization", {}).get("stage") == 0
    assert ("optimizer" in engine.config, "scheduler" in engine.config) == (True, False)
    assert engine.config.get("scheduler", "none") == engine.config.get("no such key", "none") == "none"
    with pytest.raises(KeyError):
        engine.config["scheduler"]
    assert optimizer.overflow is False
    assert engine.get_batch_info() == (2, 2, 1)
    engine.tput_timer.update_epoch_count()
    engine.destroy()


def test_a_configuration_may_be_looked_at(deepspeed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 16, "gradient_accumulation_steps": 2})
    assert config.train_micro_batch_size_per_gpu == 2
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_size": 7})


# --- leaves, places, streams


class Experts(nn.Module):
    """Two modules with parameters in one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts[0](x)
        return out


@pytest.mark.usefixtures("alone")
def test_leaves_are_marked_and_stage_3_says_what_it_cannot_do_with_them(deepspeed: ModuleType) -> None:
    model = nn.Sequential(Experts(), nn.Linear(2, 2))
    utils = deepspeed.utils
    assert utils.set_z3_leaf_modules(model, [Experts]) == utils.get_z3_leaf_modules(model) == [model[0]]
    assert utils.unset_z3_leaf_modules(model, ["Experts"]) == [model[0]]
    assert utils.set_z3_leaf_modules_by_name(model, ["0", "7"], raise_if_not_found=False) == ([model[0]], ["7"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["experts.0"], flag=False) == ([model[0].experts[0]], [])
    with pytest.raises(ValueError, match=r"no module of \['MoE'\]; it has Experts, Linear, ModuleList, Sequential"):
        utils.set_z3_leaf_modules(model, ["MoE"])
    with pytest.raises(ValueError, match=r"no module \['7'\]; named_modules\(\) has their names"):
        utils.set_z3_leaf_modules_by_name(model, ["7"])

    def made(stage: int) -> Any:
        config = {**SMALL, "zero_optimization": {"stage": stage}}
        return deepspeed.initialize(model=model, config=config)[0]

    made(2).destroy()
    with pytest.raises(ValueError, match=r'0 \(Experts\) is marked by set_z3.*"zero_optimization": {"stage": 2}'):
        made(3)
    utils.set_z3_leaf_module(model[0], False)
    utils.set_z3_leaf_modules(model, [nn.Linear])  # with nothing below them
    made(3).destroy()


@pytest.mark.usefixtures("alone")
def test_a_model_is_made_on_a_device(deepspeed: ModuleType) -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(4, 4)
    assert (made.weight.is_meta, made.weight.dtype, torch.get_default_dtype()) == (True, torch.bfloat16, torch.float32)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta", enabled=False):
        assert nn.Linear(4, 4).weight.dtype == torch.float32
    with pytest.raises(ValueError, match="initialize: weight is on the meta device and has no elements: make the"):
        deepspeed.initialize(model=made, config=SMALL)
    with pytest.raises(ValueError, match=r"OnDevice: dtype=torch\.int8; write torch\.float32"):
        deepspeed.OnDevice(dtype=torch.int8)


def test_what_is_computed_again_in_a_stream_of_its_own_draws_the_same(
    deepspeed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron's scripts have it: the tracker in the layers, the checkpoint around them."""
    from dsprof.engine import activation_checkpoint

    monkeypatch.setattr(activation_checkpoint, "_settings", activation_checkpoint._Settings())
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    monkeypatch.setattr(tracker, "_seeds", {})
    with pytest.raises(ValueError, match=r"there is no such stream; call deepspeed\.checkpointing\.model_para"):
        tracker.fork().__enter__()
    masks: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            masks.append(torch.rand(x.shape, device=x.device))
        return x * masks[-1]

    def of_rank(rank: int) -> float:
        mpu = argparse.Namespace(get_model_parallel_rank=lambda: rank, get_model_parallel_world_size=lambda: 2)
        deepspeed.checkpointing.configure(mpu)
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
        assert tracker.get_states() == {"model-parallel-rng": 5 + 2718 + rank}
        x = torch.ones(3, device=deepspeed.get_accelerator().current_device_name(), requires_grad=True)
        checkpoint = deepspeed.checkpointing.checkpoint
        checkpoint(layer, checkpoint(layer, x)).sum().backward()
        first, second, *again = masks[-4:]
        assert not torch.equal(first, second)
        assert {tuple(mask.tolist()) for mask in again} == {tuple(first.tolist()), tuple(second.tolist())}
        assert x.grad is not None
        assert torch.equal(x.grad, first * second)
        return torch.rand(()).item()

    assert of_rank(0) == of_rank(1), "what is outside the stream is the same on all ranks"
    assert not torch.equal(masks[0], masks[4])
    with pytest.raises(ValueError, match="there is one with it"):
        tracker.add("model-parallel-rng", 1)
