"""Gauges that both a collector and the analyzer know by name: of a device (NVML), of the host, of DataLoader workers.

Standard library only: it is imported inside training processes as well as by the analyzer. `schema.py` has those of the
training thread.
"""

from __future__ import annotations

from typing import Final

DEVICE: Final = "device."
"""Beginning of the names of a device's gauges. Their lane is `gpu.<NVML's index>`."""

UTILIZATION: Final = "device.utilization_percent"
MEMORY_UTILIZATION: Final = "device.memory_utilization_percent"
MEMORY_USED: Final = "device.memory_used_bytes"
MEMORY_TOTAL: Final = "device.memory_total_bytes"
POWER: Final = "device.power_w"
POWER_LIMIT: Final = "device.power_limit_w"
SM_CLOCK: Final = "device.sm_clock_mhz"
SM_CLOCK_MAX: Final = "device.sm_clock_max_mhz"
MEMORY_CLOCK: Final = "device.memory_clock_mhz"
MEMORY_CLOCK_MAX: Final = "device.memory_clock_max_mhz"
CLOCK_REASONS: Final = "device.clock_reasons"
"""A number whose bits say why the clock is what it is (CLOCK_REASON)."""
TEMPERATURE: Final = "device.temperature_c"
ECC_CORRECTED: Final = "device.ecc_corrected"
ECC_UNCORRECTED: Final = "device.ecc_uncorrected"
PCIE_GENERATION: Final = "device.pcie_generation"
PCIE_GENERATION_MAX: Final = "device.pcie_generation_max"
PCIE_WIDTH: Final = "device.pcie_width"
PCIE_WIDTH_MAX: Final = "device.pcie_width_max"
PCIE_SENT: Final = "device.pcie_sent_bytes_per_s"
PCIE_RECEIVED: Final = "device.pcie_received_bytes_per_s"
PCIE_REPLAYS: Final = "device.pcie_replays"
NVLINKS: Final = "device.nvlinks"
"""How many of its NVLinks are active."""
NVLINK_ERRORS: Final = "device.nvlink_errors"
"""Of all its NVLinks: replays, recoveries and CRC errors since the driver was loaded."""

CLOCK_REASON: Final = {
    0x4: "power limit",
    0x8: "hardware slowdown (heat, power or an external signal)",
    0x20: "heat (the driver lowers the clock)",
    0x40: "heat (the hardware lowers the clock)",
    0x80: "power brake (the power supply signals overload)",
    0x200: "board limit",
    0x400: "reliability limit",
}
"""Bit of CLOCK_REASONS -> why the clock is lower than it could be (nvml.h, nvmlClocksEventReason*). The others are no
loss: idle 0x1, clocks that somebody has set 0x2, boost in step with other GPUs 0x10, a display's clock 0x100."""

CPU_BUSY: Final = "host.cpu_percent"
CPU_STOLEN: Final = "host.cpu_steal_percent"
MEMORY_AVAILABLE: Final = "host.memory_available_bytes"
DISK_READ: Final = "host.disk_read_bytes"
DISK_WRITTEN: Final = "host.disk_written_bytes"
NETWORK_SENT: Final = "host.network_sent_bytes"
NETWORK_RECEIVED: Final = "host.network_received_bytes"
"""Of the whole machine, written by its first rank: shares since the reading before, and counts since it was started;
of the network over all interfaces but the loopback."""
RESIDENT: Final = "process.resident_bytes"
SWITCHED_OUT: Final = "process.involuntary_switches"
READ: Final = "process.read_bytes"
WRITTEN: Final = "process.written_bytes"
"""Of the rank's own process; what it read from and wrote to disks, since it began."""

THROTTLED: Final = "process.throttled_seconds"
"""For how long the CPU quota of a cgroup that it is in has stopped what ran there."""
STOPPED: Final = "process.stopped_seconds"
"""For how long no thread of it could run, for another reason than that there was no core free: written after a step."""
MAJOR_FAULTS: Final = "process.major_faults"
"""Pages that were read from a disk or from swap when they were needed."""
MEMORY_STALL: Final = "process.memory_stall_seconds"
"""For how long tasks of its cgroup, or of the machine, stood still for want of memory (PSI)."""
CORE_CLOCK: Final = "process.core_clock_mhz"
"""Of the core that its first thread ran on last."""
SEGMENTS_SENT: Final = "host.tcp_segments_sent"
SEGMENTS_AGAIN: Final = "host.tcp_segments_sent_again"
"""TCP segments of the rank's host, or of its container: sent, and sent again since nobody acknowledged them."""
PYTHON_THREAD: Final = "python_thread."
"""Beginning of the name of a gauge of the CPU time, s, of a Python thread beside the first; then comes its name."""

WORKERS: Final = "workers.alive"
"""Children by `multiprocessing`, such as DataLoader workers, that had not ended when they were looked at."""
WORKERS_BUSY: Final = "workers.busy"
WORKERS_ON_DISK: Final = "workers.on_disk"
"""How many of them were computing then (or wanted a core), and how many could not be interrupted, as where they wait
for a disk or a network file system."""
WORKERS_IN: Final = "workers.in."
"""Beginning of a name that ends in the function of the kernel in which so many of those on_disk were."""
