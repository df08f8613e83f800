"""What runs inside a training process and writes events: standard library, native helper, the torch already there.

arm          the entry point: decides whether this process is profiled
arming       has it open a capture once it becomes a rank
free_threaded  declines to, where Python has no global interpreter lock
session      one capture: opens it, installs the collectors, follows the steps, closes
catalogue    the collectors, a line each
collector    what each of them is given
parts        installing it part by part, each of which may fail alone
private_names  the private names of torch and frameworks that are used, and what is lost without each
private      looks them up
opening      what a capture is opened with: its folder, the recorder
helperless   what is recorded where there is no native helper
capture_files  its facts.jsonl and meta.json
hook_time    what capturing takes of the job
step_end     when samples are taken after a step
window       which part of the run is captured
errors       errors of our own, which the job must not see
identity     which rank, of what, and into which run folder
scratch      where its capture is written: the run folder, a local disk, shared memory; `room`: what fits there
copier       the process that copies it from there
record       writes records (the Python twin of native/)
chunks       the files they go to
native/      the same in C++, with the hot hooks
collectives  every c10d operation
collective_kernels  what comes before c10d's operators, where there is no native helper
collective_rows  what it records, likewise in Python
waits        where a thread stands still for communication
targets      what it waits for, likewise in Python
backward     where DDP begins to wait, likewise in Python
modules      the outermost module call: forward
phases       data and backward
optimizers   the step
pipelining   torch's pipeline schedules: actions of stages
checkpoints  saving them
compilation  what torch.compile takes for itself
frameworks/  what one framework needs beyond that
sharding     how FSDP was configured, and what it does for each of its units
host         pauses of the interpreter, CPU time
flops        floating-point operations of a step
device_times what its streams did when, by events
devices      which accelerator the job trains on
deep         torch.profiler over a few steps
process_groups  which there are
symmetric_memory  that a job communicates where nothing is seen of it
statements   facts on their way into the capture
facts        how DDP, DataLoader and process groups were configured, and where
hints        a script that wants to be started in another way
imports      hooks in modules that the job imports later
forks        locks that a forked child finds free
dynamo       keeping torch.compile away from all this
uncaught     the exception that ends a rank
spans        the user's own `dsprof.span` and `dsprof.mark`
"""
