"""What runs inside a training process and writes events: standard library, native helper, the torch already there.

arm             the entry point of `import torch`: decides whether this process is profiled
catalogue       the collectors, in the order in which they are installed, and what each records
spans           the user's own `dsprof.span` and `dsprof.mark`

bootstrap/      arms where torch does not load its entry points
arming/         has a process open a capture once it becomes a rank
capture/        the capture of one rank: identity, window, folder, closing
recorder/       writes records into chunk files
overrides/      the knobs of `dsprof run --set`, turned in the job without an edit
native/         the same in C++, with the hooks that run for every call
system/         what the operating system tells: its clock, /proc
hooking/        what hooks are made of: private names, wrappers, taking them away, errors
loop/           the training loop: data, forward, backward, optimizer, checkpoints, compilation
communication/  collectives, waits for them, process groups, sharding
devices/        accelerators: their streams, waits for them, NVML, torch.profiler
memory/         memory of the process and of devices, and what it is for
host/           garbage collection, CPU time, what else the host is busy with
failures/       ranks that hang or die
frameworks/     what one framework needs beyond that
"""
