"""Devices and their hosts: compute.launch-bound, compute.host-sync, compute.host-work, compute.throttle; ranks
without a core: compute.no-core; and what is done for nothing: compute.recompile, compute.optimizer, compute.recompute.

device_kernels   kernels too small for their launches; a device that comes late to collectives (rank.straggler)
host_sync        the host waits for the device
overflow_check   what looking for gradients that are not finite costs (a knob)
host_work        the device waits for a host that does something else
recompile        the same code compiled again and again
recompute        activations computed again though memory would hold them
optimizer        parameter groups that an optimizer goes through one by one
fused_optimizer  tensors that an optimizer goes through one by one
no_core          ranks that are ready to run and have no core
throttle         devices that run slower than they could
float8           linear layers that would be faster in float8 (precision.fp8)
"""
