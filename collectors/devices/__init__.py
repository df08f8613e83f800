"""Accelerators: what they do when, what holds them up, and where the script waits for them.

training_device  which accelerator the job trains on
device_times     when phases, communications and waits ran on its streams, by events
host_sync        where the script waits for it
nvml             clocks, power, heat, memory errors and links of an NVIDIA GPU
launching        for how much of its steps the device is in phases that the host is still launching
torch_profiler   torch.profiler over a few steps
deep             when that is: as `--deep` asks, or on suspicion
"""
