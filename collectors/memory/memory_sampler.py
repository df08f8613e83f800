"""Memory at the end of steps: of the process, and of the devices that it uses; what it is for, in some steps; at
level full the history of CUDA's allocators; and who held the memory when there was none left.

Rows are `mem` samples (`schema.MEMORY_NOW` and what follows it there) in lanes of their own. A number is written when
it has changed, and in any case now and then. Reading the process's takes microseconds, a device's some tens of them.
What tensors are for takes a walk over them, so it is asked in the first steps and then ever more rarely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from dsprof.schema import BETWEEN_STEPS, HOST, MEMORY_EVERY, MEMORY_LANE, Kind

from ..capture.open_capture import OpenCapture
from ..hooking.errors import count_error
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall, in_reverse
from ..loop import phases
from ..system.clock import now_ns
from . import cuda_history, live_tensors, out_of_memory
from .cuda_history import History, Snapshots
from .cuda_memory import COUNTS, POOLS, STATS, Cuda, TorchCuda, largest_free
from .live_tensors import LiveTensors, Parts
from .process_memory import HostMemory

ALWAYS: Final = 2
"""After so many steps it is asked what memory is for, however long that takes: optimizers have made their states."""
MOST_LOOKING: Final = 0.0005
"""Share of the process's CPU time that it may take after that."""
PEAKS: Final = ("allocated", "reserved")
MOST_OOMS: Final = 3
"""That are told of: a script may look for the batch size that fits by running out of memory."""
THEIRS: Final = (
    "the script records the history of CUDA memory itself, which is left alone: import the snapshot that it dumps "
    "(dsprof import FILE)"
)


def install(capture: OpenCapture) -> list[Uninstall]:
    """Sample memory after steps."""

    def sample() -> Uninstall:
        sampler = Sampler(capture, TorchCuda(), HostMemory(), live_tensors.live(), cuda_history.history())
        return in_reverse(sampler.install(phases.before_backward))

    def watch() -> None:
        live_tensors.watch()  # goes on after the capture, as models are made before the next one

    parts = (
        HookPart("what memory is for (parameters, gradients, optimizer states) is not known", watch),
        HookPart("memory is not sampled", sample),
    )
    return install_each("memory", parts)


class Sampler:
    """Samples one process. `history`: at level full."""

    def __init__(
        self, capture: OpenCapture, cuda: Cuda, host: HostMemory, live: LiveTensors, history: History,
        clock: Callable[[], int] = now_ns, cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:  # fmt: skip
        self._capture, self._cuda, self._host, self._live = capture, cuda, host, live
        self._clock, self._cpu_clock = clock, cpu_clock
        self._history = history if capture.full else None
        self._snapshots = Snapshots(cuda, history, capture.folder, capture.write_fact)
        self._limits = host.limits()
        self._capacity = self._limits.least
        self._written: dict[tuple[str, str, str], tuple[float, int]] = {}
        """Where, name and pool -> what was written last, and in which step."""
        self._ids: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        """Where, name and pool -> the ids of name, lane and pool."""
        self._steps = 0
        self._resident = 0
        """When the last step ended, bytes."""
        self._next_look = 1
        """In which step it is asked what memory is for, if that has not taken too long so far."""
        self._opened = cpu_clock()
        self._looking = 0
        """CPU time of the process meanwhile, all in all, ns."""
        self._devices: list[int] = []
        """Those that hold something."""
        self._edge: dict[str, int] | None = None
        """While a step is looked at: what there was when it began, by place."""
        self._gradients: Parts = {}
        self._activations: dict[str, int] = {}
        self._between: dict[str, int] = {}
        """What there was without gradients that have gone since, by place, when the step's first backward began."""
        self._observed = False
        self._ooms = 0
        self._process = os.getpid()

    def install(self, before_backward: Callable[[Callable[[], None]], Uninstall]) -> list[Uninstall]:
        """`before_backward` has a function called when a backward pass begins."""
        limits = self._limits
        self._capture.write_fact(
            {"fact": "memory_limits", "cgroup": limits.cgroup, "path": limits.path, "host_bytes": limits.host,
             "address_space": limits.address_space, "oom_kills": limits.oom_kills}
        )  # fmt: skip
        if self._history is not None and self._capture.is_on():
            try:
                self._history.begin()
            except Exception as error:
                count_error("the memory history", error)
        self._capture.samples.append(self.after_step)
        self._capture.when_on.append(self._turned_on)
        return [self._close, before_backward(self._backward_begins)]

    # --- steps ------------------------------------------------------------------------------------

    def after_step(self, steps: int = 1) -> bool:
        """So many training steps have ended since the last time. Whether to be called after the next one, too: that
        one's backward tells what activations take."""
        if not self._capture.is_on():
            self._turned_off()
            return False
        self._steps += steps
        now = self._clock()
        looks = self._steps >= self._next_look and (
            self._steps <= ALWAYS or self._looking <= MOST_LOOKING * (self._cpu_clock() - self._opened)
        )
        levels = {HOST: self._sample_host(now)}
        on_device = self._cuda.initialized() and not self._cuda.capturing()
        if on_device:
            if not self._observed:
                self._observed = True
                try:
                    self._cuda.observe_oom(self._out_of_memory)
                except Exception as error:
                    count_error("an out-of-memory error", error)
            if looks or not self._devices:
                self._devices = list(range(self._cuda.devices()))
            stats = {device: self._cuda.stats(device) for device in self._devices}
            self._devices = [device for device in self._devices if _current(stats[device], "reserved_bytes")]
            for device in self._devices:
                self._sample_device(now, device, stats[device])
                levels[f"cuda.{device}"] = _current(stats[device], "allocated_bytes")
        if self._edge is not None:
            for place, size in self._activations.items():
                self._write(now, place, "activations", size)
            for place, size in self._between.items():
                self._write(now, place, BETWEEN_STEPS, size)
            self._edge, self._activations, self._between = None, {}, {}
        if looks:
            self._next_look = 2 * self._steps
            began = self._cpu_clock()
            try:
                self._look(now, levels, on_device)
            except Exception as error:
                count_error("what memory is for", error)
            self._looking += self._cpu_clock() - began
        return looks

    def _sample_host(self, now: int) -> int:
        """Resident memory."""
        resident, virtual = self._host.now()
        self._resident = resident
        self._write(now, HOST, "resident", resident)
        self._write(now, HOST, "resident_peak", self._host.resident_peak(resident))
        if self._capacity is not None:
            self._write(now, HOST, "capacity", self._capacity)
        if self._limits.address_space is not None:
            self._write(now, HOST, "virtual", virtual)
        return resident

    def _sample_device(self, now: int, device: int, stats: dict[str, Any]) -> None:
        place = f"cuda.{device}"
        for name, key in STATS.items():
            self._write(now, place, name, _current(stats, key))
            for pool in POOLS:
                self._write(now, place, name, _current(stats, key, pool), pool)
        for name in PEAKS:
            self._write(now, place, f"{name}_peak", int(stats[STATS[name]]["all"]["peak"]))
        for name, key in COUNTS.items():
            self._write(now, place, name, int(stats[key]), counts=True)

    def _look(self, now: int, levels: dict[str, int], on_device: bool) -> None:
        """What memory is for, and what there is of it; the next step's activations will be told, too."""
        parts = self._live.measure()
        for (place, part), size in parts.items():
            self._write(now, place, part, size)
        self._edge = {place: size for place, size in levels.items() if place != HOST or not self._devices}
        self._gradients = {where: size for where, size in parts.items() if where[1] == "gradients"}
        if on_device and self._devices:
            segments = self._cuda.segments()
            for device in self._devices:
                place = f"cuda.{device}"
                self._write(now, place, "capacity", self._cuda.capacity(device))
                self._write(now, place, "free", self._cuda.free(device))
                self._write(now, place, "largest_free", largest_free(segments, device))

    def _backward_begins(self) -> None:
        """Gradients that went since the step began made room for what is kept for backward."""
        if self._edge is None or not self._capture.is_on():
            return
        began = self._cpu_clock()
        gradients = self._live.gradients()
        on_device = self._cuda.initialized() and not self._cuda.capturing()
        for place, before in self._edge.items():
            if place == HOST:
                level = self._host.now()[0]
            elif on_device:
                level = _current(self._cuda.stats(int(place.rpartition(".")[2])), "allocated_bytes")
            else:
                continue
            gone = self._gradients.get((place, "gradients"), 0) - gradients.get((place, "gradients"), 0)
            self._between.setdefault(place, max(before - gone, 0))
            held = max(level - before + gone, 0)
            self._activations[place] = max(held, self._activations.get(place, 0))
        self._looking += self._cpu_clock() - began

    def _write(self, now: int, place: str, name: str, value: int, pool: str = "", counts: bool = False) -> None:
        """A sample, unless it was written lately and is the same."""
        key = (place, name, pool)
        before, step = self._written.get(key, (-1, -MEMORY_EVERY))
        if value == before and self._steps - step < MEMORY_EVERY:
            return
        self._written[key] = value, self._steps
        number, size = (float(value), -1) if counts else (None, value)
        ids = self._ids.get(key)
        if ids is None:
            intern = self._capture.recorder.intern
            ids = self._ids[key] = intern(name), intern(MEMORY_LANE + place), intern(pool) if pool else 0
        named, lane, purpose = ids
        self._capture.recorder.span(int(Kind.MEM), named, now, now, 0, number, size, 0, lane, -1, -1, 0, purpose)

    # --- the window -------------------------------------------------------------------------------

    def _turned_on(self) -> None:
        self._written.clear()
        self._next_look = self._steps + 1
        if self._history is not None:
            self._history.begin()

    def _turned_off(self) -> None:
        """The history of what was captured is written as soon as that is over."""
        if self._history is not None and self._history.recording:
            self._write_snapshot()
            self._history.stop()

    def _write_snapshot(self) -> None:
        if self._cuda.initialized():
            self._snapshots.write()

    def _close(self) -> None:
        try:
            if self._process == os.getpid():
                self._tell_of_the_end()
                self._turned_off()
                if self._history is not None and self._history.theirs:
                    self._capture.write_fact({"fact": "note", "text": THEIRS})
        finally:
            self._process = -1
            if self.after_step in self._capture.samples:
                self._capture.samples.remove(self.after_step)
            if self._turned_on in self._capture.when_on:
                self._capture.when_on.remove(self._turned_on)
            self._host.close()

    # --- out of memory ----------------------------------------------------------------------------

    def _out_of_memory(self, device: int, asked: int, capacity: int, free: int) -> None:
        """torch calls it, on the thread that asked, before it raises."""
        try:
            if self._process != os.getpid() or self._ooms >= MOST_OOMS:
                return
            self._ooms += 1
            stats = self._cuda.stats(device)
            theirs = self._history is not None and self._history.theirs
            held = {name: _current(stats, key) for name, key in STATS.items()}
            fact: Fact = {
                "fact": "out_of_memory", "place": f"cuda.{device}", "asked": asked, "capacity": capacity, "free": free,
                **held, "step": self._steps, "error": "OutOfMemoryError", "said": "",
                "stack": out_of_memory.stack_here(2), "parts": self._parts(f"cuda.{device}"), "variables": [],
            }  # fmt: skip
            if self._ooms == 1 and not theirs:
                fact["snapshot"] = self._snapshots.write(out_of_memory=True)
            self._capture.write_fact(fact)
        except Exception as error:
            count_error("an out-of-memory error", error)

    def _tell_of_the_end(self) -> None:
        """Of a process that ends because the host gave it no more."""
        error = out_of_memory.of_process()
        if error is None:
            return
        resident, virtual = self._host.now()
        limits = self._host.limits()  # which the script may have set itself
        said = f"{type(error).__name__}: {error}"
        self._capture.write_fact(
            {
                "fact": "out_of_memory", "place": HOST, "asked": out_of_memory.asked_for(said),
                "capacity": limits.address_space or limits.least, "resident": resident, "virtual": virtual,
                "resident_peak": self._host.resident_peak(resident), "resident_at_step": self._resident,
                "step": self._steps, "error": type(error).__name__, "said": said.partition("\n")[0][:500],
                "stack": out_of_memory.stack_of(error), "parts": self._parts(HOST),
                "variables": out_of_memory.variables_of(error.__traceback__, HOST),
            }
        )  # fmt: skip

    def _parts(self, place: str) -> dict[str, int]:
        return {part: size for (where, part), size in self._live.measure().items() if where == place}


def _current(stats: dict[str, Any], key: str, pool: str = "all") -> int:
    """Bytes now; 0 of a device that was never used."""
    return int(stats[key][pool]["current"]) if stats else 0
