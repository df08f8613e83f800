"""`dsprof doctor`: what it says of a configuration and of a machine, and how it ends."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsprof import cli, doctor
from dsprof.collectors.catalogue import COLLECTORS, GROUPS
from dsprof.collectors.native import build
from dsprof.doctor import GIB, advice, diagnose
from dsprof.machine import Collects, Gpu, Machine, Port, inspect

HEALTHY = Machine(
    versions={
        "python": "3.12.1", "torch": "2.13.0", "cuda": "12.8", "nvcc": None, "nccl": "2.27.3", "deepspeed": "0.19.8",
        "driver": "570.1", "driver cuda": "12.8",
    },
    torch_sees_gpus=True,
    cpus=64,
    memory_bytes=512 * GIB,
    gpus=(Gpu("NVIDIA H200", 141 * GIB, 16, 16),) * 3,
    visible_gpus=2,
    links={"0-1": "NVLink", "0-2": "across NUMA nodes", "1-2": "across NUMA nodes"},
    ports=(Port("eth0", "ethernet", True, "25000 Mb/s"), Port("mlx5_0:1", "infiniband", True, "400 Gb/sec (4X NDR)")),
    limits={"nofile": 1_048_576, "memlock": None, "nproc": 500_000},
    shm_bytes=256 * GIB,
    shm_free_bytes=200 * GIB,
    compiler="/usr/bin/g++",
    collectors=(
        Collects("modules", "the training loop", "forward"), Collects("phases", "the training loop", "backward"),
        Collects("nvml", "GPUs", "clocks", "the NVIDIA driver is not loaded; see nvidia-smi"),
        Collects("deepspeed", "frameworks", "its engine", "deepspeed is not installed"),
        Collects("engine", "frameworks", "dsprof's own"),
    ),
)  # fmt: skip

THIS_MACHINE = """\
this machine
  python        3.12.1
  torch         2.13.0, built for CUDA 12.8, NCCL 2.27.3
  nvcc          none
  DeepSpeed     0.19.8
  driver        570.1, for CUDA 12.8
  GPUs          3, 1 of them hidden by CUDA_VISIBLE_DEVICES
  GPU 0         NVIDIA H200, 141 GiB, PCIe x16
  GPU 1         NVIDIA H200, 141 GiB, PCIe x16
  GPU 2         NVIDIA H200, 141 GiB, PCIe x16
  interconnect  NVLink between 0-1
  interconnect  across NUMA nodes between 0-2, 1-2
  NVML          answers: clocks, power and errors are known while a job runs
  CPU           64 cores, 512 GiB
  eth0          ethernet, up, 25000 Mb/s
  mlx5_0:1      infiniband, up, 400 Gb/sec (4X NDR)
  ulimit        nofile 1,048,576, memlock unlimited, nproc 500,000
  /dev/shm      200.00 GiB free of 256.00
  allocator     defaults of torch and the C library
  C++ compiler  /usr/bin/g++

what a capture records here (--without NAME leaves a part out)
  the training loop
    modules          forward
    phases           backward
  GPUs               not here: the NVIDIA driver is not loaded; see nvidia-smi
    nvml             clocks
  frameworks
    deepspeed        its engine; not here: deepspeed is not installed
    engine           dsprof's own
"""


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsprof.cli.doctor.inspect", lambda environ: HEALTHY)
    monkeypatch.setattr("dsprof.cli.doctor.left_behind.move_all", lambda given: ())


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("healthy")
def test_the_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.out == THIS_MACHINE + "\nnothing to complain of\n"
    assert said.err == ""


@pytest.mark.usefixtures("healthy")
def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        tmp_path,
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10, "log_level": "info",
         "optimizer": {"type": "sgd"}, "bf16": {"enabled": True}},
    )  # fmt: skip
    assert cli.main(["doctor", str(path), "--world-size", "8"]) == 0
    assert capsys.readouterr().out == (
        f"""\
{path}, for 8 ranks
  batch                          64 = 2 a GPU x 4 accumulated x 8 data-parallel ranks
  gradients                      added up over 4 micro-batches in fp32, summed over ranks in bf16
  steps_per_print                10
  gradient_clipping              1.0
  prescale_gradients             false
  gradient_predivide_factor      1.0
  sparse_gradients               false
  zero_allow_untested_optimizer  false
  dataloader_drop_last           false
  dump_state                     false
  wall_clock_breakdown           false
  memory_breakdown               false
  sequence_parallel_size         1
  optimizer
    type                         SGD
    params
      lr                         0.001
      momentum                   0.0
      dampening                  0.0
      weight_decay               0.0
      nesterov                   false
  bf16
    enabled                      true
    check_grad_overflow          true
  at their defaults              zero_optimization, fp16, fp8, data_types, activation_checkpointing,
                                 checkpoint, aio, comms_logger, flops_profiler, tensorboard, csv_monitor,
                                 tensor_parallel, context_parallel, pipeline, heterogeneous

{THIS_MACHINE}
warning  log_level: has no effect; it says what DeepSpeed logs
"""
    )


@pytest.mark.usefixtures("healthy")
def test_a_configuration_with_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 7, "offload_parm": {}}, "timers": {}}')
    assert cli.main(["doctor", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(THIS_MACHINE)
    joined = " ".join(said.out.removeprefix(THIS_MACHINE).split())
    assert joined == (
        f"error {path}: zero_optimization.offload_parm: unknown key; the nearest is offload_param "
        f"error {path}: zero_optimization.stage: 7 is not 0, 1, 2 or 3; the default is 0 "
        "warning timers: has no effect; steps are timed by the hooks, without synchronizing the device"
    )


@pytest.mark.usefixtures("healthy")
def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "timers": {}})
    assert cli.main(["doctor", "--json", "--world-size", "2", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["config"], said["world_size"], said["errors"]) == (str(path), 2, [])
    assert said["warnings"] == ["timers: has no effect; steps are timed by the hooks, without synchronizing the device"]
    assert said["effective"]["train_micro_batch_size_per_gpu"] == 4
    assert said["effective"]["zero_optimization"]["overlap_comm"] is True
    assert said["machine"]["versions"]["torch"] == "2.13.0"
    assert said["machine"]["gpus"][0] == {
        "name": "NVIDIA H200", "memory_bytes": 141 * GIB, "pcie_width": 16, "pcie_width_max": 16,
    }  # fmt: skip

    path.write_text("{")
    assert cli.main(["doctor", "--json", str(path)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["errors"] == ["line 1, column 2: not JSON: expecting property name enclosed in double quotes"]
    assert said["effective"] is None


@pytest.mark.usefixtures("healthy")
def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, what in ((tmp_path / "gone.json", "no such file"), (tmp_path, "is a folder")):
        assert cli.main(["doctor", str(name)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err == f"[dsprof] error: {name}: {what}; name the JSON file of a configuration\n"
    assert cli.main(["doctor", "--world-size", "0"]) == 2
    assert capsys.readouterr().err.startswith("[dsprof] error: ")


@pytest.mark.usefixtures("healthy")
def test_shares_of_unequal_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {"train_batch_size": 14, "gradient_accumulation_steps": 2, "heterogeneous": {"speeds": [1, 2, 4, None]}}
    assert cli.main(["doctor", str(written(tmp_path, raw)), "--world-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  batch                          14 = (1 + 2 + 4 + 0) x 2 accumulated" in lines
    shares = "replica 0: 14.3%, replica 1: 28.6%, replica 2: 57.1%, replica 3: 0.0%"
    assert f"  shares                         {shares}" in lines
    raw["heterogeneous"] = {"speeds": "measure"}
    assert cli.main(["doctor", str(written(tmp_path, raw)), "--world-size", "4"]) == 0
    assert "14, divided by speeds that are measured at the start" in capsys.readouterr().out


@pytest.mark.usefixtures("healthy")
def test_shards_of_ranks_of_unequal_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "heterogeneous": {"memory": [80, 40]},
    }  # fmt: skip
    assert cli.main(["doctor", str(written(tmp_path, raw)), "--world-size", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "shards replica 0: 66.7%, replica 1: 33.3%" in lines
    raw |= {"sequence_parallel_size": 2, "heterogeneous": {"memory": [80, 40, 40, None]}}
    assert cli.main(["doctor", str(written(tmp_path, raw)), "--world-size", "4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "shards rank 0: 50.0%, rank 1: 25.0%, rank 2: 25.0%, rank 3: 0.0%" in lines
    assert "batch 8 = 4 a set x 1 accumulated x 2 sets of 2 ranks" in lines
    raw["heterogeneous"] = {"memory": "measure"}
    assert cli.main(["doctor", str(written(tmp_path, raw)), "--world-size", "2"]) == 0
    assert "divided by memory that is measured at the start" in capsys.readouterr().out


def test_ranks_are_the_visible_gpus_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], healthy: None
) -> None:
    monkeypatch.setattr("dsprof.cli.doctor.visible_gpus", lambda environ: 4)
    path = written(tmp_path, {"train_micro_batch_size_per_gpu": 3})
    assert cli.main(["doctor", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["effective"]["train_batch_size"] == 12


# --- judging --------------------------------------------------------------------------------------


def test_a_healthy_machine_is_passed_over_in_silence() -> None:
    assert list(advice(HEALTHY)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shm_bytes": 64 * 2**20, "shm_free_bytes": 64 * 2**20},
         "/dev/shm: 0.062 GiB, through which data loader workers and NCCL hand over data; in a container pass "
         "`--shm-size=8g` or `--ipc=host`"),
        ({"shm_free_bytes": 5 * GIB}, "/dev/shm: 5 GiB free of 256 GiB; remove what dead jobs have left there"),
        ({"limits": {"nofile": 1024, "memlock": None, "nproc": None}},
         "ulimit -n: 1024, and ranks and data loader workers open sockets and shared memory; write `ulimit -n 65536` "
         "before the job starts"),
        ({"limits": {"nofile": None, "memlock": None, "nproc": 100}},
         "ulimit -u: 100, and every rank starts dozens of threads; write `ulimit -u 65536` before the job starts"),
        ({"limits": {"nofile": None, "memlock": 2**23, "nproc": None}},
         "ulimit -l: 0.0078 GiB, and InfiniBand locks the memory it sends from; write `ulimit -l unlimited`, in a "
         "container pass `--ulimit memlock=-1`"),
        ({"ports": (Port("mlx5_1:1", "infiniband", False, ""),)},
         "mlx5_1:1: this InfiniBand port is not active; NCCL will use the others, or TCP"),
        ({"costly": {"CUDA_LAUNCH_BLOCKING": "the program waits for every kernel"}},
         "CUDA_LAUNCH_BLOCKING: is set, so the program waits for every kernel; unset it unless you are looking for a "
         "bug"),
        ({"allocator": {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "b"}},
         "PYTORCH_CUDA_ALLOC_CONF: b, and PYTORCH_ALLOC_CONF, which has taken its place, is a; unset it"),
        ({"allocator": {"LD_PRELOAD": "libjemalloc.so:/gone/libtcmalloc.so"}},
         "LD_PRELOAD: /gone/libtcmalloc.so does not exist, so every program complains and runs without it; unset it"),
        ({"compiler": None},
         "no C++ compiler: dsprof's native helper cannot be built, and the recorder in Python costs more, and"
         " records only phases and steps on GPUs; install g++, or run `dsprof build` where there is one"),
        ({"torch_error": "ImportError: libcudart.so.12"},
         "torch: cannot be imported (ImportError: libcudart.so.12); install it again"),
        ({"versions": {"torch": "2.13.0+cpu", "cuda": None}},
         "torch: 2.13.0+cpu is built without CUDA, and there are 3 GPUs; install the CUDA build"),
        ({"torch_sees_gpus": False},
         "torch: finds none of the GPUs; it is built for CUDA 12.8, and the driver 570.1 is for CUDA 12.8: install a "
         "newer driver, or an older build of torch"),
        ({"gpus": (Gpu("A", GIB, 0, 16), Gpu("B", GIB, 4, 16))},
         "GPU 1: uses 4 of its 16 PCIe lanes; check its slot"),
        ({"lost": {"torch.autograd._engine_run_backward": "backward passes are not recorded"},
          "versions": {"torch": "3.0.0", "cuda": "12.8"}},
         "torch: 3.0.0 has no torch.autograd._engine_run_backward, which dsprof uses, so backward passes are not "
         "recorded"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_machine(changes: dict[str, Any], says: str) -> None:
    assert list(advice(replace(HEALTHY, **changes))) == [says]


def test_locked_memory_matters_with_infiniband_only() -> None:
    limits = {"nofile": None, "memlock": 65536, "nproc": None}
    assert list(advice(replace(HEALTHY, limits=limits, ports=()))) == []


def test_folders_for_offloaded_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings(folder: Path) -> tuple[str, ...]:
        offload = {"device": "nvme", "nvme_path": str(folder)}
        path = written(
            tmp_path, {"train_batch_size": 1, "zero_optimization": {"stage": 1, "offload_optimizer": offload}}
        )
        return diagnose(path, 1, HEALTHY).warnings

    (tmp_path / "file").write_text("")
    assert warnings(tmp_path / "not yet" / "there") == ()
    assert warnings(tmp_path / "file" / "below") == (
        f"zero_optimization.offload_optimizer.nvme_path: {tmp_path / 'file'} is not a folder here; "
        "name one on the local disk",
    )
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert warnings(tmp_path) == (
        f"zero_optimization.offload_optimizer.nvme_path: {tmp_path} cannot be written here; name another folder",
    )


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=GIB // 4))
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    path = written(tmp_path, {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": offload}})
    assert diagnose(path, 1, HEALTHY).warnings == (
        f"zero_optimization.offload_param.nvme_path: 0.25 GiB are free in {tmp_path} here; name a larger disk",
    )


# --- looking --------------------------------------------------------------------------------------


def planted(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def program(path: Path, output: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}\nEOF\n")
    path.chmod(0o755)
    return path


def test_this_machine() -> None:
    import torch

    machine = inspect({**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "MALLOC_ARENA_MAX": "2", "NCCL_P2P_DISABLE": "0"})
    assert machine.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert machine.versions["torch"] == torch.__version__
    assert machine.versions["cuda"] == torch.version.cuda
    assert machine.torch_error is None
    assert machine.cpus == len(os.sched_getaffinity(0))
    assert set(machine.limits) == {"nofile", "memlock", "nproc"}
    assert machine.allocator["MALLOC_ARENA_MAX"] == "2"
    assert machine.costly == {"CUDA_LAUNCH_BLOCKING": "the program waits for every kernel"}


def test_network_interfaces_and_infiniband(tmp_path: Path) -> None:
    planted(tmp_path, {
        "net/lo/type": "772", "net/lo/operstate": "unknown",
        "net/eth0/type": "1\n", "net/eth0/operstate": "up\n", "net/eth0/speed": "25000\n",
        "net/eth1/type": "1", "net/eth1/operstate": "down", "net/eth1/speed": "-1", "net/eth1/device/vendor": "",
        "net/ib0/type": "32", "net/ib0/operstate": "up",
        "net/ifb0/type": "1", "net/ifb0/operstate": "down",
        "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n", "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "infiniband/mlx5_1/ports/1/link_layer": "Ethernet", "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/mlx5_1/ports/1/rate": "100 Gb/sec",
    })  # fmt: skip
    machine = inspect({}, sys_class=tmp_path, shm=tmp_path / "gone")
    assert machine.ports == (
        Port("eth0", "ethernet", True, "25000 Mb/s"),
        Port("eth1", "ethernet", False, ""),
        Port("ib0", "ip over infiniband", True, ""),
        Port("mlx5_0:1", "infiniband", True, "400 Gb/sec (4X NDR)"),
        Port("mlx5_1:1", "rdma over ethernet", False, "100 Gb/sec"),
    )
    assert (machine.shm_bytes, machine.shm_free_bytes) == (None, None)


def test_compilers(tmp_path: Path) -> None:
    nvcc = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131"
    program(tmp_path / "cuda" / "bin" / "nvcc", nvcc)
    compiler = program(tmp_path / "bin" / "clang++")
    machine = inspect({"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")})
    assert machine.versions["nvcc"] == "12.4"
    assert machine.compiler == str(compiler)
    chosen = inspect({"PATH": str(tmp_path / "bin"), "CXX": "no-such-compiler -O2"})
    assert chosen.compiler is None


def test_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    machine = inspect({})
    assert machine.torch_error == "ModuleNotFoundError: import of torch halted; None in sys.modules"
    assert machine.versions["torch"] is not None


class Nvml(types.ModuleType):
    """A driver with three GPUs, two of them on one NVLink."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlSystemGetDriverVersion = staticmethod(lambda: "570.86")
    nvmlSystemGetCudaDriverVersion = staticmethod(lambda: 12080)
    nvmlDeviceGetName = staticmethod(lambda handle: f"GPU of {handle}")
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: types.SimpleNamespace(total=80 * GIB))
    nvmlDeviceGetMaxPcieLinkWidth = staticmethod(lambda handle: 16)
    nvmlDeviceGetP2PStatus = staticmethod(lambda one, other, index: 0 if (one, other, index) == (0, 1, 2) else 5)
    nvmlDeviceGetTopologyCommonAncestor = staticmethod(lambda one, other: 50 if other == 2 and one == 0 else 99)

    @staticmethod
    def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
        if handle == 2:
            raise RuntimeError("not supported")
        return 8


def test_the_stand_in_speaks_as_the_library_does() -> None:
    import pynvml

    names = [name for name in vars(Nvml) if name.lower().startswith("nvml")]
    assert len(names) > 10
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (2, 0)
    assert (pynvml.NVML_TOPOLOGY_SINGLE, pynvml.NVML_TOPOLOGY_SYSTEM) == (10, 50)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    machine = inspect({"CUDA_VISIBLE_DEVICES": "0,2"})
    assert machine.gpus == (
        Gpu("GPU of 0", 80 * GIB, 8, 16),
        Gpu("GPU of 1", 80 * GIB, 8, 16),
        Gpu("GPU of 2", 80 * GIB, 0, 16),
    )
    assert machine.visible_gpus == 2
    assert (machine.versions["driver"], machine.versions["driver cuda"]) == ("570.86", "12.8")
    assert machine.links == {"0-1": "NVLink", "0-2": "across NUMA nodes", "1-2": "unknown"}


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("raw words")
        self.value = value


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NvmlError(12), "no NVIDIA driver here: its library, libnvidia-ml.so.1, is not found"),
        (NvmlError(9), "the NVIDIA driver is not loaded; see nvidia-smi"),
        (NvmlError(999), "the NVIDIA driver does not answer (NvmlError: raw words)"),
        (ImportError("gone"), "the package nvidia-ml-py is not there; pip install nvidia-ml-py"),
    ],
)
def test_why_nvml_does_not_answer_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def fails() -> None:
        raise error

    silent = Nvml("pynvml")
    monkeypatch.setattr(silent, "nvmlInit", fails, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", silent)
    machine = inspect({})
    assert machine.nvml == says
    assert machine.gpus == ()


def test_each_collector_is_described_with_what_it_lacks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(build, "find", lambda: None)
    found = inspect({"CUDA_VISIBLE_DEVICES": "", "PATH": "/gone"}).collectors
    assert {one.name for one in found} == set(COLLECTORS)
    groups = [one.group for one in found]
    assert groups == sorted(groups, key=GROUPS.index), "those of a group stand together"
    lacks = {one.name: one.lacks for one in found}
    assert lacks["nvml"] == lacks["device-times"] == "no GPU that torch can use"
    assert lacks["flops"] == "no C++ compiler for the native helper"
    assert lacks["modules"] == lacks["memory"] == ""
    monkeypatch.setattr(build, "find", lambda: Path("/opt/helper/dsprof_native.so"))
    without_compiler = inspect({"CUDA_VISIBLE_DEVICES": "", "PATH": "/gone"})
    assert {one.name: one.lacks for one in without_compiler.collectors}["flops"] == ""
    assert not [text for text in advice(without_compiler) if "compiler" in text]
