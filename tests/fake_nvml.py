"""A fake NVML, which gives every answer and every error that is asked of it. Constants and errors are pynvml's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import pynvml

ANSWERS: Final[dict[tuple[Any, ...], Any]] = {
    ("nvmlSystemGetDriverVersion",): "580.65",
    ("nvmlDeviceGetIndex",): 3,
    ("nvmlDeviceGetUUID",): "GPU-1234",
    ("nvmlDeviceGetName",): b"NVIDIA H100",
    ("nvmlDeviceGetUtilizationRates",): SimpleNamespace(gpu=97, memory=41),
    ("nvmlDeviceGetMemoryInfo",): SimpleNamespace(used=60 << 30, total=80 << 30),
    ("nvmlDeviceGetPowerUsage",): 612_500,
    ("nvmlDeviceGetEnforcedPowerLimit",): 700_000,
    ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM): 1755,
    ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM): 2619,
    ("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM): 1980,
    ("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM): 2620,
    ("nvmlDeviceGetCurrentClocksEventReasons",): 0x44,
    ("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU): 71,
    ("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC): 4,
    ("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC): 1,
    ("nvmlDeviceGetCurrPcieLinkGeneration",): 4,
    ("nvmlDeviceGetMaxPcieLinkGeneration",): 5,
    ("nvmlDeviceGetCurrPcieLinkWidth",): 8,
    ("nvmlDeviceGetMaxPcieLinkWidth",): 16,
    ("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES): 1_500,
    ("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES): 22_000,
    ("nvmlDeviceGetPcieReplayCounter",): 12,
    **{("nvmlDeviceGetNvLinkState", link): int(link != 2) for link in range(4)},
    **{("nvmlDeviceGetNvLinkErrorCounter", link, kind): 10 * link + kind for link in range(4) for kind in range(4)},
}
"""Function and its arguments behind the handle -> what it answers. A link that is not among them is not there."""


@dataclass
class FakeNvml:
    """answers: in the place of those of ANSWERS; an exception is raised. `calls`: function and arguments, in order."""

    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(real):
            return real  # constants and errors
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((name, *arguments))
        if name in ("nvmlInit", "nvmlShutdown"):
            answer = self.answers.get((name,))
        elif name.startswith("nvmlDeviceGetHandleBy"):
            answer = self.answers.get((name, *arguments), f"handle of {arguments[0]}")
        elif name == "nvmlDeviceGetDeviceHandleFromMigDeviceHandle":
            answer = "the whole of it"
        else:
            key = (name, *arguments[1:])
            known = {**ANSWERS, **self.answers}
            answer = known.get(key, known.get((name,), pynvml.NVMLError_InvalidArgument()))
        if isinstance(answer, list):  # one after the other; the last for good
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer
