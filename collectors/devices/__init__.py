"""Accelerators: what they do when, what holds them up, and where the script waits for them.

training_device  which accelerator the job trains on
device_times     when phases, communications and waits ran on its streams, by events
host_sync        where the script waits for it
nvml             clocks, power, heat, memory errors and links of an NVIDIA GPU
torch_profiler   torch.profiler over a few steps (`--deep`)
"""
