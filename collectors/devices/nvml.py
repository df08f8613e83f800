"""What the device does beside computing: clocks and why they are no higher, power, heat, memory errors, its links.

NVIDIA's management library (pynvml, the package nvidia-ml-py) is asked about once a second, on a thread beside the
training, of the one device that this process uses. It knows nothing of CUDA's contexts and starts none. Where it is not
to be had there is one note, and what a device does not tell is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dsprof import gauges
from dsprof.schema import Kind

from ..capture.open_capture import OpenCapture
from ..capture.side_thread import Poller, SideThread, import_on_side_thread
from ..hooking.uninstall import Uninstall
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..hooking.statements import Fact

LINKS: Final = 18
"""NVLinks that a GPU has at most (NVML_NVLINK_MAX_LINKS)."""
LINK_ERRORS: Final = range(4)
"""nvmlNvLinkErrorCounter_t: replays, recoveries, CRC errors of flits, of data."""
KB: Final = 1000

UNTOLD: Final = frozenset({2, 3, 4, 6, 13})
"""Answers (nvmlReturn_t) after which a device is not asked for the same again: invalid argument, not supported, no
permission, not found, function not found."""
LOST: Final = frozenset({1, 9, 15, 16, 18})
"""Answers after which it is not asked for anything: not initialized, driver not loaded, the GPU is lost, requires a
reset, driver and library do not fit."""


@dataclass(frozen=True)
class Metric:
    """A gauge.

    every: it is read in one of so many looks
    of_instance: a part of a GPU (MIG) has its own; else that of the whole GPU is taken
    """

    name: str
    ask: Callable[[Any, Any], float]
    every: int = 1
    of_instance: bool = False


def _reasons(nvml: Any, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # by its name in older drivers and packages
        return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _memory(nvml: Any, handle: Any) -> Any:
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # older: what the driver keeps for itself counts as used
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _active_links(nvml: Any, handle: Any) -> list[int]:
    active = []
    for link in range(LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                active.append(link)
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            if not link:  # it has none
                raise
            break
    return active


def _link_errors(nvml: Any, handle: Any) -> float:
    links = _active_links(nvml, handle)
    counts = [nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind) for link in links for kind in LINK_ERRORS]
    return float(sum(counts))


METRICS: Final = (
    Metric(gauges.UTILIZATION, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu, of_instance=True),
    Metric(gauges.MEMORY_UTILIZATION, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).memory, of_instance=True),
    Metric(gauges.MEMORY_USED, lambda n, h: _memory(n, h).used, of_instance=True),
    Metric(gauges.MEMORY_TOTAL, lambda n, h: _memory(n, h).total, 60, of_instance=True),
    Metric(gauges.POWER, lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000),
    Metric(gauges.POWER_LIMIT, lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000, 60),
    Metric(gauges.SM_CLOCK, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    Metric(gauges.SM_CLOCK_MAX, lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM), 60),
    Metric(gauges.MEMORY_CLOCK, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)),
    Metric(gauges.MEMORY_CLOCK_MAX, lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM), 60),
    Metric(gauges.CLOCK_REASONS, _reasons),
    Metric(gauges.TEMPERATURE, lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
    Metric(
        gauges.ECC_CORRECTED,
        lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC),
        5,
    ),
    Metric(
        gauges.ECC_UNCORRECTED,
        lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
        5,
    ),
    Metric(gauges.PCIE_GENERATION, lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h), 5),
    Metric(gauges.PCIE_GENERATION_MAX, lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h), 60),
    Metric(gauges.PCIE_WIDTH, lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h), 5),
    Metric(gauges.PCIE_WIDTH_MAX, lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h), 60),
    Metric(gauges.PCIE_SENT, lambda n, h: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES) * KB, 5),
    Metric(gauges.PCIE_RECEIVED, lambda n, h: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES) * KB, 5),
    Metric(gauges.PCIE_REPLAYS, lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h), 5),
    Metric(gauges.NVLINKS, lambda n, h: len(_active_links(n, h)), 10),
    Metric(gauges.NVLINK_ERRORS, _link_errors, 10),
)


def install(capture: OpenCapture) -> list[Uninstall]:
    """Watch the device after the first step, when the script has chosen one."""
    started: list[SideThread] = []

    def begin() -> None:
        import torch

        capture.after_step.remove(begin)
        if not torch.cuda.is_initialized():
            return
        number = torch.cuda.current_device()
        uuid = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
        name = device_name(number, os.environ, uuid)
        watch = Watch(capture, name, lambda: import_on_side_thread("pynvml"), lambda: beside.stopping)
        beside = SideThread("nvml", watch.looks)
        started.append(beside)
        beside.start()

    def uninstall() -> None:
        while started:
            started.pop().stop()

    capture.after_step.append(begin)
    return [uninstall]


def device_name(number: int, environ: Mapping[str, str], uuid: str = "") -> str | int:
    """What NVML knows CUDA's device `number` by: a UUID, or its own index.

    uuid: what CUDA says of the device, if it does. Only CUDA_VISIBLE_DEVICES names an instance (MIG), and only without
    a UUID does its order count, which CUDA's may differ from.
    """
    visible = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = visible[number] if number < len(visible) else ""
    if entry.startswith("MIG-"):
        return entry
    if uuid:
        return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if entry.startswith("GPU-"):
        return entry
    return int(entry) if entry.isdigit() else number


class Watch:
    """The looks at one device.

    name: as `device_name` gives it
    library: gives pynvml, or raises
    stopping: whether nothing is to be written any more
    """

    def __init__(
        self, capture: OpenCapture, name: str | int, library: Callable[[], Any], stopping: Callable[[], bool]
    ) -> None:
        self._capture, self._name, self._library, self._stopping = capture, name, library, stopping

    def looks(self) -> Poller:
        try:
            nvml = self._library()
            nvml.nvmlInit()
        except Exception as error:  # no package, no library, no driver, no permission
            self._note(error)
            return
        try:
            try:
                handle, whole, fact = self._open(nvml)
            except Exception as error:
                self._note(error)
                return
            self._state(fact)
            yield from self._read(nvml, handle, whole, f"gpu.{fact['index']}")
        finally:
            nvml.nvmlShutdown()

    def _open(self, nvml: Any) -> tuple[Any, Any, Fact]:
        """Handles of the device and of the whole GPU that it is on, and what is known of it."""
        by = nvml.nvmlDeviceGetHandleByUUID if isinstance(self._name, str) else nvml.nvmlDeviceGetHandleByIndex
        handle = whole = by(self._name)
        if isinstance(self._name, str) and self._name.startswith("MIG-"):
            whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return handle, whole, {
            "fact": "gpu",
            "index": int(nvml.nvmlDeviceGetIndex(whole)),
            "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
            "name": _text(nvml.nvmlDeviceGetName(whole)),
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        }  # fmt: skip

    def _read(self, nvml: Any, handle: Any, whole: Any, lane: str) -> Poller:
        recorder = self._capture.recorder
        names = {metric: recorder.intern(metric.name) for metric in METRICS}
        number, looks = recorder.intern(lane), 0
        while names:
            for metric in [metric for metric in names if looks % metric.every == 0]:
                if self._stopping():
                    return
                try:
                    value = float(metric.ask(nvml, handle if metric.of_instance else whole))
                except AttributeError:  # an older package
                    del names[metric]
                    continue
                except nvml.NVMLError as error:
                    if error.value in LOST:
                        self._note(error)
                        return
                    if error.value in UNTOLD:
                        del names[metric]
                    continue
                if not self._stopping():  # else the driver kept us until the capture was closed
                    now = now_ns()
                    recorder.span(
                        Kind.GAUGE, names[metric], now, now, 0, value, -1, 0, number, -1, -1, 0, 0
                    )  # fmt: skip
            looks += 1
            yield

    def _note(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._state({"fact": "note", "text": f"the GPU's clocks, power and errors are not known: NVML says {said}"})

    def _state(self, fact: Fact) -> None:
        if not self._stopping():
            self._capture.write_fact(fact)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
