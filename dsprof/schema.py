"""The seam between capture and analysis: what things are called, and the trace table's columns. How a capture lies on
disk is `ondisk`'s.

Standard library only: it is imported inside training processes as well as by the analyzer.
"""

from __future__ import annotations

import enum
from typing import Final


class Kind(enum.IntEnum):
    """What a record is; the trace table's `kind` is its lower-case name."""

    STEP = 1
    PHASE = 2
    MODULE = 3
    COMM = 4
    WAIT = 5
    PIPE = 6
    COPY = 7
    KERNEL = 8
    LAUNCH = 9
    MEM = 10
    GAUGE = 11
    PAUSE = 12
    MARK = 13


DTYPES: Final = (
    "", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip
"""torch's ScalarType number + 1 -> name; anything later is stored as 0."""

COLLECTIVE_NAMES: Final = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""c10d operator (without `c10d::`) -> the name in the trace. An operator not listed keeps its own."""

SYNCHRONIZING: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank ends before all have begun."""
FLOAT_BYTES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Of an element of a gradient or a parameter."""

PHASES: Final = (
    "data", "loader_start", "forward", "loss", "backward", "recompute", "clip", "optimizer", "between", "checkpoint",
    "compile",
)  # fmt: skip
"""`loader_start` is `iter(DataLoader)`: starting its workers. `recompute` is forward again, inside backward.
`checkpoint` is saving one, `compile` is torch.compile's own work. Derived on merge are `loss` (last module to
backward), `clip` (backward to optimizer) and, where no DataLoader was seen, `between` (optimizer to the next forward):
how the loop gets its input, perhaps. Where the engine trains, `backward` and `optimizer` are its own `backward` and
`step`, with what it waits for in them."""
LOADING: Final = ("data", "loader_start")
"""Phases in which the loop is in a DataLoader."""

OF_A_NORM: Final = 4096
"""Bytes that the norms of gradients, or whether they overflowed, take at most: some numbers a parameter."""
SMALL_GRADIENTS: Final = "gradients"
"""Of a fact `optimizer`: elements of each gradient at its first step, where none has more than OF_A_NORM bytes."""

SHARDING: Final = "FSDP::sharding"
"""Name of the `module` rows in which FSDP2 works for one of its units, and stage 3 of DeepSpeed or of dsprof's engine
for a module, before or after its forward or backward, or DeepSpeed's stages 1 and 2 or dsprof's engine for buckets of
gradients. No module of a model can have it."""

BUDGET_PARTS: Final = (
    "compute", "comm_exposed", "peer_wait", "bubble", "data", "optimizer", "offload", "pause", "other",
)  # fmt: skip

BACKWARD_DONE: Final = "backward_done"
"""Name of the `mark` row where the last gradient of a backward has been made, and DDP's reducer begins to wait."""

DEVICE_CLOCK: Final = "device_clock"
"""Name of the `gauge` records that align a device's clock: between `start_ns` and `end_ns` of the host it was `value`,
in ns, on the device."""
STREAM_WAIT: Final = "stream_wait"
EVENT_RECORDED: Final = "event_recorded"
"""Names of marks on a stream's lane: where it was told to wait for an event, and where that was recorded on another
one; both have the event's `corr`."""
HOST_SYNC: Final = "host_sync"
"""Name of the `mark` rows in which a thread of the host stands still until a device has done what it was given.
`purpose` is the call that does it, of SYNC_CALLS where it is an operator; `site`, where it was called, outside of
torch; `bytes`, what was copied. A row says that the host stood, not that the device did."""
SYNC_CALLS: Final = ("item", "nonzero", "copy to host", "copy to device")

CALL_SITE: Final = "call_site"
"""Name of the `mark` rows of lines (`site`; none: no line of Python's) that issue collectives of a name (`purpose`),
size (`bytes`) and type (`value`: its index in DTYPES). Without a name: there are lines of which none of these tell."""
ALL_MARKED: Final = 16
"""Of collectives that are alike, the first ones of which none is left out."""

CPU_SECONDS: Final = "cpu_seconds"
"""Name of the `gauge` row of a process's CPU time so far, written after a step, or every Nth where steps are short."""
STEPS_TAKEN: Final = "steps_taken"
"""Name of the `gauge` row written beside it: how many optimizers' steps the process had counted by then. Older captures
have none: they wrote CPU_SECONDS at each of them."""
HOOK_SECONDS: Final = "hook_seconds"
"""Name of the `gauge` row of what hooks took in one training step, which ended then; one step in 64."""
SAMPLE_SECONDS: Final = "sample_seconds"
SIDE_THREAD_SECONDS: Final = "side_thread_seconds"
"""Names of the `gauge` rows written beside it: what samples after steps have taken so far, and the CPU time of the
profiler's own threads."""
CUDA_GRAPH_FACT: Final = "cuda_graph"
"""Kind of the facts of CUDA graphs that were replayed, and of how many `communications` each of them holds (null: not
known): of these nothing is seen."""
SYMMETRIC_MEMORY_FACT: Final = "symmetric_memory"
"""Kind of the fact that a rank has symmetric memory: what ranks read and write of each other there is not seen."""
STACK: Final = "stack"
"""Name of the `gauge` rows of where the training thread was; `value`: the number of the stack."""
STACK_FACT: Final = "stack"
"""Kind of the facts of these: `number`, and `frames` from the outermost in: lines of the script, then functions of
libraries."""
RECOMPILED_FACT: Final = "recompiled"
"""Kind of the facts of a function (`function`, `site`) that torch.compile has compiled again so far: how many `times`,
`spent_ms` altogether, and the guard that failed last (`reason`). Of several of one function the last counts."""
CHECKPOINTED_FACT: Final = "activation_checkpointing"
"""Kind of the facts of a line (`site`, or the `framework`) whose activations are computed again in backward;
`selective`: by a policy that keeps some of them."""
OVERFLOW: Final = "overflow"
"""Name of the `mark` rows of steps that were skipped since gradients overflowed; `value`: the scale of the loss."""
SCALER_FACT: Final = "grad_scaler"
"""Kind of the fact of a GradScaler of torch's: whether it is `enabled`, its `growth_interval` (steps without an
overflow after which it raises the scale), whether what it skips is `seen`, and the line that steps with it."""
LOST_FACT: Final = "lost"
"""Kind of the facts of what could not be hooked, in words; one is `decisive` where its collectors are as good as
switched off."""
LINEAR_FACT: Final = "linear_layers"
"""Kind of the facts of the linear layers of a model (`layers`): of each its name, inputs, outputs and type."""
FLOPS_FACT: Final = "flops"
"""Kind of the facts of a step's floating-point operations (`dsprof.collectors.loop.flops`), which become these rows:"""
FLOPS: Final = "flops."
"""Beginning of the name of the `gauge` rows of a step's floating-point operations; then comes their dtype. `purpose` is
one of FLOPS_FOR, `module` in whose call, and the row spans the step that was counted."""
FLOPS_FOR: Final = ("forward", "backward", "recompute", "other")
"""What they are for: a forward that is trained, its backward, what that computes for a second time, and all else."""
UNCOUNTED: Final = "uncounted."
"""The same of an operator whose operations are not known; then comes its name. `value`: how many calls."""
COUNTED: Final = "counted_steps"
"""Name of the `gauge` row that spans all of these; `value`: how many steps of optimizers it holds. Older captures have
none."""
SAMPLES: Final = "samples"
TOKENS: Final = "tokens"
"""Names of the `gauge` rows of a batch, at the beginning of the forward of `module`."""
MEMORY_LANE: Final = "memory."
"""Beginning of the lane of `mem` rows; then comes `host`, or a device such as `cuda.0`."""
HOST: Final = "host"
MEMORY_NOW: Final = ("allocated", "reserved", "active", "inactive_split", "resident", "virtual")
"""Names of `mem` rows at the end of a step: of a device's caching allocator, and of the process; `purpose` is the pool,
`small_pool` or `large_pool`, none of both together."""
MEMORY_EVERY: Final = 16
"""Optimizer steps after which a `mem` row is written although its number has not changed: some of a long capture's
records may go."""
MEMORY_PEAKS: Final = ("allocated_peak", "reserved_peak", "resident_peak")
"""The most so far, or since the job had torch forget it."""
MEMORY_LIMITS: Final = ("capacity", "free", "largest_free")
"""What there is at most for the process; what the device had left; the largest free block of the cache."""
MEMORY_COUNTS: Final = ("retries", "ooms")
"""How often so far the allocator gave its cache back for want of memory, and how often that was not enough; `value`."""
MEMORY_PARTS: Final = ("parameters", "gradients", "optimizer_states", "buffers", "activations")
"""What tensors are for, in some steps only. Activations: what was allocated, or the process had grown by, when backward
began, beyond what there was when the step before had ended."""
BETWEEN_STEPS: Final = "between_steps"
"""Name of a `mem` row beside the activations: what there was when the step before had ended, without gradients that
were gone when backward began. Older captures have none."""
SNAPSHOT_NAME: Final = "memory.pickle"
OOM_SNAPSHOT_NAME: Final = "memory-oom.pickle"
"""In a capture: snapshots of the devices' allocators, as `torch.cuda.memory._dump_snapshot` writes them; of the end,
and of when a device had no more."""
CAPTURE_ON: Final = "capture_on"
CAPTURE_OFF: Final = "capture_off"
"""Names of the `mark` rows where a rank begins and ceases to record; `value`: its optimizer steps so far."""
CAPTURE_GAP: Final = "capture_gap"
"""Name of the `mark` row for the time whose records were given up, from the last one before to the first one after it;
`value`: how many steps the rank had counted by its end; 0 where it counts none."""
UNCAUGHT: Final = "uncaught"
"""A fact: the exception that ended a rank: `type`, `message` (a line, redacted), `site` (file:line)."""

STANDSTILL: Final = "standstill"
"""Fact of a rank that has recorded nothing for the time-out: since when, whether it works all the same, its stacks."""
DEADLOCK: Final = "deadlock: "
"""Begins the name of the `mark` row in which dsprof's engine tells of a deadlock that it proved (`engine.hooks`)."""
LOCKED: Final = "locked"
"""Fact of the stacks in STACKS_FILE."""
WENT_ON: Final = "went_on"
"""Fact that it did go on."""
STACKS_FILE: Final = "stacks.txt"
"""In a capture: Python stacks written without the interpreter's lock, where a thread held it and did not give it up."""
HANGS_FILE: Final = "hangs.json"
"""In the run folder: the times that the launcher called the job hung."""
TRIAL_FILE: Final = "trial.{rank}.{pid}.json"
"""What a rank of a trial leaves in the run folder: its losses. See `collectors.loop.trial`."""
CONTROL_FILE: Final = "control.json"
"""In the run folder: what the ranks of a job that runs are told (`dsprof.control`)."""
COPYING_FILE: Final = "copying.json"
"""In a capture of which not all is in the run folder yet: where the rest lies, and why."""

TIME_KINDS: Final = ("training", "evaluation", "checkpointing", "compilation", "startup", "rest")
"""What the run's wall time divides into."""

# --- files and times of a capture ---------------------------------------------------------------

DEEP_FILE: Final = "deep.pt.trace.json"
"""In a capture: what torch.profiler saw of the steps of `--deep`. A fact `deep` says from when to when (`start_ns`,
`end_ns`, monotonic), with what beginning and ending took."""

MOST_UNSEEN: Final = 0.1
"""Share of the step for which a device may be in phases that its host is still launching, within which it may stand
idle unseen: where it is more, steps are traced (`collectors.devices.deep`), and without them no verdict is drawn."""

HANG_TIMEOUT: Final = "600"
"""Seconds, unless DSPROF_HANG_TIMEOUT says otherwise."""

# --- the trace table --------------------------------------------------------------------------

COLUMNS: Final = {
    "rank": "int32",
    "restart": "int16",
    "step": "int32",
    "kind": "category",
    "name": "category",
    "lane": "category",
    "thread": "Int32",
    "depth": "Int32",
    "start_ns": "int64",
    "dur_ns": "Int64",
    "ended": "boolean",
    "issue_ns": "Int64",
    "arrival_ns": "Int64",
    "host_ns": "Int64",
    "stage": "Int16",
    "microbatch": "Int16",
    "module": "category",
    "purpose": "category",
    "group": "category",
    "seq": "Int32",
    "peer": "Int32",
    "tag": "Int32",
    "root": "Int32",
    "bytes": "Int64",
    "dtype": "category",
    "value": "float64",
    "grad": "boolean",
    "corr": "Int64",
    "site": "category",
    "source": "category",
}
"""Column -> pandas dtype. `issue_ns` is when the host asked, `host_ns` how long the issuing thread was inside the call.

`arrival_ns`, of a `comm` row, is when the chain of the rank that runs the communication was ready for it: on a device,
when its stream reached it; on gloo, when a worker took it. Null where nothing tells. Skew and lateness are of arrivals
where they are known: a host that runs ahead of its device is not early.

`dur_ns` is null for what never ended (`ended` False: evidence of a hang or a kill) and for a collective on a device
whose end nobody measured (`ended` True)."""

SOURCES: Final = ("measured", "derived", "imported")
