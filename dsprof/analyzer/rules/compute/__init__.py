"""Devices and their hosts: compute.launch-bound, compute.host-sync, compute.host-work, compute.throttle.

device_kernels  kernels too small for their launches; a device that comes late to collectives (rank.straggler)
host_sync       the host waits for the device
host_work       the device waits for a host that does something else
throttle        devices that run slower than they could
"""
