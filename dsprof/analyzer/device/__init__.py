"""The ranks' devices.

rank    what the streams of one rank's device did, where their kernels were traced
ranks   all of them together: who came late to which collective, what was exposed, at which bandwidth
unknown whether much of it is in kernels of unknown kind
gauges  what the devices told of themselves (NVML)
"""

from __future__ import annotations

from .rank import DeviceTime, StreamIdle, device_time
from .ranks import Bandwidth, Devices, compare_devices
from .unknown import unknown_kernels

__all__ = ["Bandwidth", "DeviceTime", "Devices", "StreamIdle", "compare_devices", "device_time", "unknown_kernels"]
