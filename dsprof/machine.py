"""The machine as a training job would meet it: looked at, not judged."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from dsprof.launch.devices import visible_gpus

ALLOCATOR: Final = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "LD_PRELOAD", "MALLOC_CONF",
    "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES",
)  # fmt: skip
"""Variables that change how memory is allocated."""
COSTLY: Final = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the program waits for every kernel",
    ("NCCL_IB_DISABLE", "1"): "machines talk over TCP although there may be InfiniBand",
    ("NCCL_P2P_DISABLE", "1"): "GPUs talk through host memory instead of NVLink or PCIe",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of one machine talk over the network",
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"): "every allocation asks the driver, and waits for the GPU",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked by another one",
}
"""Variable and value -> what it costs."""
TOPOLOGY: Final = {
    0: "one board", 10: "PCIe switch", 20: "PCIe switches", 30: "PCIe host bridge", 40: "one NUMA node",
    50: "across NUMA nodes",
}  # fmt: skip
"""nvmlGpuTopologyLevel_t -> what two GPUs have in common."""
ETHERNET, LOOPBACK, INFINIBAND = "1", "772", "32"
"""ARPHRD_ types in /sys/class/net/*/type."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver knows of."""

    name: str
    memory_bytes: int
    pcie_width: int
    """Lanes in use; 0 where that is not told."""
    pcie_width_max: int
    """Lanes that GPU and slot could use."""


@dataclass(frozen=True)
class Port:
    """A network interface, or a port of an InfiniBand adapter."""

    name: str
    kind: str
    up: bool
    speed: str
    """As the driver says it; empty if it does not."""


@dataclass(frozen=True)
class Collects:
    """A part of what a capture records, in words. lacks: what it needs and there is not here; empty: it works."""

    name: str
    group: str
    records: str
    lacks: str = ""


@dataclass(frozen=True)
class Machine:
    """What a training job would meet here. What is None could not be found out, or is not there."""

    versions: Mapping[str, str | None]
    """Of python, torch, cuda (that torch was built for), nvcc, nccl, deepspeed, driver, and the driver's CUDA."""
    torch_error: str | None = None
    """Why torch cannot be imported."""
    torch_sees_gpus: bool = False
    cpus: int = 0
    """Cores that this process may use."""
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    visible_gpus: int = 0
    """Of these, those that CUDA_VISIBLE_DEVICES leaves."""
    nvml: str = ""
    """What NVML, which tells of clocks, power and errors while a job runs, does not answer for; empty: it answers."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Pair of GPUs, such as `0-1` -> what connects them."""
    ports: tuple[Port, ...] = ()
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits of `ulimit` on nofile, memlock (bytes) and nproc; None is unlimited."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    allocator: Mapping[str, str] = field(default_factory=dict)
    """Variables that change how memory is allocated."""
    costly: Mapping[str, str] = field(default_factory=dict)
    """Variables with a value that costs time -> what it does."""
    compiler: str | None = None
    """C++ compiler for the native helper."""
    helper: str | None = None
    """The native helper for this torch, where it was built before."""
    collectors: tuple[Collects, ...] = ()
    """What `--without` can leave out of a capture."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Private name of torch that dsprof uses and this torch has not -> what is lost without it."""


def inspect(
    environ: Mapping[str, str], *, sys_class: Path = Path("/sys/class"), shm: Path = Path("/dev/shm")
) -> Machine:
    """Look at this machine. Imports torch, and asks the NVIDIA driver where there is one."""
    torch, torch_error = _torch()
    driver, gpus, links, silent = _nvidia()
    size, free = _room(shm)
    compiler, helper = _compiler(environ), _helper()
    missing = {
        "gpu": "" if torch.get("available") == "yes" and visible_gpus(environ) else "no GPU that torch can use",
        "nvml": silent,
        "native": "" if compiler or helper else "no C++ compiler for the native helper",
    }
    return Machine(
        versions={
            "python": platform.python_version(),
            "torch": torch.get("torch") or _installed("torch"),
            "cuda": torch.get("cuda"),
            "nvcc": _nvcc(environ),
            "nccl": torch.get("nccl"),
            "deepspeed": _installed("deepspeed"),
            "driver": driver.get("driver"),
            "driver cuda": driver.get("cuda"),
        },
        torch_error=torch_error,
        torch_sees_gpus=torch.get("available") == "yes",
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_memory(),
        gpus=gpus,
        visible_gpus=visible_gpus(environ),
        nvml=silent,
        links=links,
        ports=(*_interfaces(sys_class / "net"), *_infiniband(sys_class / "infiniband")),
        limits=_limits(),
        shm_bytes=size,
        shm_free_bytes=free,
        allocator={name: environ[name] for name in ALLOCATOR if environ.get(name)},
        costly={name: cost for (name, value), cost in COSTLY.items() if environ.get(name) == value},
        compiler=compiler,
        helper=helper,
        collectors=_collectors(missing),
        lost={} if torch_error is not None else _lost(),
    )


def _lost() -> dict[str, str]:
    from dsprof.collectors.hooking import private

    return {one.name: one.lost for one in private.gone()}


def _collectors(missing: Mapping[str, str]) -> tuple[Collects, ...]:
    """`missing`: of what a collector may need, why it is not here; empty: it is."""
    from dsprof.collectors.catalogue import COLLECTORS, GROUPS

    def lacks(needs: tuple[str, ...]) -> str:
        said = (missing.get(one, "" if _installed(one) else f"{one} is not installed") for one in needs)
        return next(filter(None, said), "")

    collects = [Collects(name, one.group, one.records, lacks(one.needs)) for name, one in COLLECTORS.items()]
    return tuple(sorted(collects, key=lambda one: GROUPS.index(one.group)))


def _torch() -> tuple[dict[str, str], str | None]:
    """What torch says of itself, and why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["available"] = "yes" if torch.cuda.is_available() else "no"
        nccl: Any = torch.cuda.nccl  # not typed in every torch
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, nccl.version()))
    return found, None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvcc(environ: Mapping[str, str]) -> str | None:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)] + ["/usr/local/cuda"]
    places = os.pathsep.join([*(f"{home}/bin" for home in homes), environ.get("PATH", "")])
    nvcc = shutil.which("nvcc", path=places)
    if nvcc is None:
        return None
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.partition("release ")[2].partition(",")[0] or None


def _nvidia() -> tuple[dict[str, str], tuple[Gpu, ...], dict[str, str], str]:
    """Driver, GPUs and what connects them; nothing where there is no driver, and why."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, no driver, no permission
        return {}, (), {}, _why(error)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
        driver = {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{number // 1000}.{number % 1000 // 10}",
        }
        links = {
            f"{one}-{two}": _link(pynvml, handles[one], handles[two])
            for one, two in combinations(range(len(handles)), 2)
        }
        return driver, tuple(_gpu(pynvml, handle) for handle in handles), links, ""
    except Exception as error:  # a driver and a library that do not fit
        return {}, (), {}, _why(error)
    finally:
        pynvml.nvmlShutdown()


NVML_SAYS: Final = {
    4: "this user may not ask the NVIDIA driver; see the permissions of /dev/nvidiactl",
    9: "the NVIDIA driver is not loaded; see nvidia-smi",
    12: "no NVIDIA driver here: its library, libnvidia-ml.so.1, is not found",
    18: "the NVIDIA driver and its library are of different versions; restart the machine",
}
"""nvmlReturn_t -> what it means."""


def _why(error: Exception) -> str:
    """Why NVML does not answer, in words."""
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is not there; pip install nvidia-ml-py"
    code = int(getattr(error, "value", 0))
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return NVML_SAYS.get(code, f"the NVIDIA driver does not answer ({said})")


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    def ask(question: Callable[[Any], int]) -> int:
        try:
            return int(question(handle))
        except Exception:  # not told by virtual GPUs
            return 0

    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
    )


def _link(pynvml: Any, one: Any, other: Any) -> str:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return TOPOLOGY[int(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other))]
    except Exception:  # not told by virtual GPUs
        return "unknown"


def _interfaces(folder: Path) -> Iterator[Port]:
    kinds = {ETHERNET: "ethernet", INFINIBAND: "ip over infiniband"}
    for entry in sorted(folder.glob("*")):
        kind = _text(entry / "type")
        up = _text(entry / "operstate") in ("up", "unknown")  # virtual interfaces do not know
        if kind != LOOPBACK and (up or (entry / "device").exists()):
            speed = _text(entry / "speed")
            yield Port(entry.name, kinds.get(kind, "other"), up, f"{speed} Mb/s" if speed.isdigit() else "")


def _infiniband(folder: Path) -> Iterator[Port]:
    for entry in sorted(folder.glob("*/ports/*")):
        adapter, port = entry.parent.parent.name, entry.name
        kind = "infiniband" if _text(entry / "link_layer") == "InfiniBand" else "rdma over ethernet"
        yield Port(f"{adapter}:{port}", kind, "ACTIVE" in _text(entry / "state"), _text(entry / "rate"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a driver that does not tell answers with EINVAL
        return ""


def _limits() -> dict[str, int | None]:
    numbers = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    soft = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def _room(folder: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.total, usage.free


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _compiler(environ: Mapping[str, str]) -> str | None:
    """As the native helper's build chooses it: CXX or nothing, else the first there is."""
    chosen = shlex.split(environ.get("CXX", ""))
    candidates = [chosen[0]] if chosen else ["g++", "c++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name, path=environ.get("PATH")))), None)


def _helper() -> str | None:
    from dsprof.collectors.native import build

    if "torch" not in sys.modules:  # it cannot be imported
        return None
    try:
        found = build.find()
    except Exception:  # a torch without a version, a home that cannot be looked at
        return None
    return None if found is None else str(found)
