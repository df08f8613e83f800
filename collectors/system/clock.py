"""The clock of a capture: CLOCK_MONOTONIC, which the native helper reads, too (`native/chunks.hpp`)."""

from __future__ import annotations

import os
import time
from typing import Final

from . import proc

now_ns: Final = time.monotonic_ns
"""ns since some moment before this process began."""


def process_start_ns() -> int | None:
    """When this process began, to 10 ms; None where the kernel does not tell."""
    try:
        since_boot_ns = int(proc.stat("self")[proc.START_TICKS]) * 1_000_000_000 // proc.TICKS_A_SECOND
        # The clock since boot goes on while the host sleeps, the monotonic one does not.
        return since_boot_ns - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - now_ns())
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def clock_id() -> str:
    """Names the clock: processes of one name read the same. Empty where the system does not tell.

    Hosts may share a name, and containers of one host may each have a clock of their own (time_namespaces(7)).
    """
    boot = proc.read("/proc/sys/kernel/random/boot_id").decode().strip()
    if not boot:
        return ""
    try:
        _, seconds, nanoseconds = proc.read("/proc/self/timens_offsets").decode().partition("\n")[0].split()
        mine, childrens = os.readlink("/proc/self/ns/time"), os.readlink("/proc/self/ns/time_for_children")
    except (OSError, ValueError):  # no time namespaces
        return boot
    # The offsets are those that children get, which are ours unless we have just been given others for them.
    return f"{boot}{f'+{seconds}.{nanoseconds}' if mine == childrens else f' {mine}'}"
