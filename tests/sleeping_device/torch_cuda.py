"""torch.cuda on the sleeping device: torch's own functions where they can be, over `torch._C`'s names."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

CAPACITY = 80 << 30
told: dict[str, int] = {}
"""How often the device was told what it has no answer to."""
CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._event = torch.Event(device="cuda", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        self._event.wait(torch.cuda.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return float(self._event.elapsed_time(end._event))


class Stream(torch.Stream):
    """torch.cuda.Stream, whose methods call each other as torch's do."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            made: Stream = super().__new__(cls, **kwargs)
        else:
            made = super().__new__(cls, device="cuda:0", priority=priority)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        super().synchronize()

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


def install(device: Any) -> None:
    """Have torch.cuda, torch.distributed and what is below them use `device`, the bindings."""
    cuda: Any = torch.cuda
    c: Any = torch._C
    properties = SimpleNamespace(
        total_memory=CAPACITY, name="Sleeping device", major=9, minor=0, multi_processor_count=132, uuid="sleeping"
    )

    def at(stream: int) -> tuple[int, int, int]:
        return stream, 0, 1  # a stream's id, the device's index and type

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._graph = device.Graph()

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            self._graph.capture_begin(CAPTURE_MODES[capture_error_mode])

        def capture_end(self) -> None:
            self._graph.capture_end()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._graph.reset()

        def pool(self) -> tuple[int, int]:
            return 0, 1

    def statistics(number: int = 0) -> dict[str, Any]:
        allocated, peak, allocations = device.memory()
        sizes = {"current": allocated, "peak": peak, "allocated": allocated, "freed": 0}
        counts = {"current": allocations, "peak": allocations, "allocated": allocations, "freed": 0}
        nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        pools = {"all": sizes, "small_pool": nothing, "large_pool": sizes}
        found: dict[str, Any] = {
            f"{key}_bytes": pools for key in ("allocated", "reserved", "active", "inactive_split", "requested")
        }
        found["inactive_split_bytes"] = {"all": nothing, "small_pool": nothing, "large_pool": nothing}
        found |= {
            key: {"all": counts, "small_pool": nothing, "large_pool": counts}
            for key in ("allocation", "segment", "active", "inactive_split")
        }
        plain = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        found |= dict.fromkeys(plain, 0) | {"oversize_allocations": nothing, "oversize_segments": nothing}
        return {**found, "max_split_size": -1}

    def refuse(what: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"the sleeping device has no {what}")

        return call

    # Below torch.cuda.
    c._cuda_getDevice = lambda: 0
    c._cuda_setDevice = lambda number: None
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = lambda number: 0
    c._cuda_getDeviceCount = lambda: 1
    c._cuda_synchronize = device.synchronize
    c._cuda_getCurrentStream = lambda number: at(device.current_stream())
    c._cuda_getDefaultStream = lambda number: at(0)
    c._cuda_getCurrentRawStream = lambda number: device.current_stream()
    c._cuda_setStream = lambda stream_id, device_index, device_type: device.set_stream(stream_id)
    c._cuda_isCurrentStreamCapturing = device.is_capturing
    c._cuda_memoryStats = statistics
    c._cuda_resetPeakMemoryStats = lambda number: device.reset_peak()
    c._cuda_emptyCache = c._host_emptyCache = lambda: None
    c._cuda_memorySnapshot = lambda *args: {"segments": [], "device_traces": []}
    c._cuda_getMemoryFraction = lambda number: 1.0
    c._cuda_isHistoryEnabled = lambda: False
    c._cuda_attach_out_of_memory_observer = lambda observer: None
    c._cuda_record_memory_history = refuse("allocation history")
    c._cuda_getCompiledVersion = lambda: 12080

    cuda._initialized = True
    cuda._lazy_init = cuda.init = lambda: None
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = lambda number: None
    cuda._exchange_device = cuda._maybe_exchange_device = lambda number: 0
    cuda.get_device_properties = lambda number=None: properties
    cuda.get_device_name = lambda number=None: properties.name
    cuda.get_device_capability = lambda number=None: (9, 0)
    cuda.mem_get_info = lambda number=None: (CAPACITY - device.memory()[0], CAPACITY)
    cuda.memory.mem_get_info = cuda.mem_get_info
    cuda.default_generators = (torch.default_generator,)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = device.is_capturing
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.nccl.version = lambda: (2, 27, 5)
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = lambda: (0, 1)
    cuda.memory._cuda_memoryStats = statistics

    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(self, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        told["record_stream"] = told.get("record_stream", 0) + 1

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]

    # The backend, under NCCL's name.
    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self._timeout = self.global_ranks_in_group = self.group_name = None

    def made(store: Any, rank: int, size: int, options: Any) -> Any:
        from torch.distributed import ProcessGroupGloo

        host = ProcessGroupGloo(distributed.PrefixStore("host", store), rank, size, timeout=options._timeout)
        name = "".join(letter if letter.isalnum() else "_" for letter in str(options.group_name))
        return device.Nccl(host, rank, size, os.environ["SLEEPING_DEVICE_MEETS"], name)

    class Metaclass(type):
        """`isinstance` sees the backend in C++, whose constructor this stands for."""

        def __call__(cls, *args: Any) -> Any:
            return made(*args)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, device.Nccl)

    device.Nccl.options = SimpleNamespace(_timeout=timedelta(minutes=10))
    group = Metaclass("ProcessGroupNCCL", (), {"Options": Options})
    distributed_c10d.ProcessGroupNCCL = distributed.ProcessGroupNCCL = group  # type: ignore[misc, assignment]
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
