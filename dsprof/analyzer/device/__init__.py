"""The ranks' devices.

stream_time      what the streams of one rank's device did, where their kernels were traced
host_waits       where one rank's training thread waits for its device, and what the device stood idle after it
comparison       all of them together: who came late to which collective, what was exposed, at which bandwidth
unknown_kernels  whether much of it is in kernels of unknown kind
device_gauges    what the devices told of themselves (NVML)
"""

from __future__ import annotations

from .comparison import Bandwidth, Devices, compare_devices
from .host_waits import host_waits, kernel_steps
from .stream_time import DeviceTime, StreamIdle, device_time
from .unknown_kernels import unknown_kernels

__all__ = [
    "Bandwidth", "DeviceTime", "Devices", "StreamIdle", "compare_devices", "device_time", "host_waits", "kernel_steps",
    "unknown_kernels",
]  # fmt: skip
