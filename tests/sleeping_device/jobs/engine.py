"""What the engine does on a GPU: its lanes, and what times phases. Tells the spans and lines of each part by name."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import sleeping_device as device
import torch

from dsprof.engine import initialize
from dsprof.engine.comm.lane import CudaLane
from dsprof.engine.hooks import FAILURES, Attributes, Hooks, Span
from dsprof.engine.monitors.breakdown import CudaTimer, WallClock, timer_for


class Spans:
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.ended: list[Span] = []

    def begin(self, span: Span) -> None: ...

    def end(self, span: Span) -> None:
        self.ended.append(span)

    def told(self, kind: str) -> list[tuple[str, int, int, int]]:
        """Name, start, end, bytes."""
        return [(s.name, s.start_ns, s.end_ns or 0, s.bytes or 0) for s in self.ended if s.kind == kind]


def about(size: int = 8) -> Attributes:
    return {"purpose": "gradient", "bytes": size, "group": "dp", "seq": 0}


def lane() -> dict[str, Any]:
    """Two communications beside a computation of 100 ms, of which the first is over when it is waited for."""
    hooks, spans, stages = Hooks(), Spans(), []
    hooks.subscribe(spans)
    lane = CudaLane("gradients", hooks)
    asked = device.counts().get("synchronize", 0)
    device.kernel("computing", 100)
    first = lane.submit(lambda: device.kernel("first", 50), "all_reduce", **about(8))
    device.kernel("more", 20)
    second = lane.submit(lambda: device.kernel("second", 200), "all_reduce", **about(16))
    lane.poll()
    stages.append((first.done, second.done, len(spans.told("comm"))))
    first._end.synchronize()  # type: ignore[attr-defined]
    lane.poll()
    stages.append((first.done, second.done, len(spans.told("comm"))))
    second.wait()
    device.kernel("after", 1)
    asked = device.counts()["synchronize"] - asked - 1  # but for the job's own
    lane.close()
    return {"stages": stages, "comm": spans.told("comm"), "launch": spans.told("launch"), "synchronized": asked}


def late_listener() -> dict[str, Any]:
    hooks, spans = Hooks(), Spans()
    lane = CudaLane("gradients", hooks)
    ticket = lane.submit(lambda: device.kernel("unheard", 5), "all_reduce", **about())
    hooks.subscribe(spans)
    device.kernel("head start", 50)
    lane.submit(lambda: device.kernel("heard", 3), "all_reduce", **about(16))
    lane.close()
    return {"comm": spans.told("comm"), "done": ticket.done}


def memory() -> dict[str, Any]:
    lane = CudaLane("gradients", Hooks())

    def send() -> tuple[Any, weakref.ref[torch.Tensor]]:
        sent = torch.ones(2, device="cuda")
        return lane.submit(lambda: sent.sum(), "all_reduce", **about()), weakref.ref(sent)

    ticket, memory = send()
    gc.collect()
    kept = [memory() is not None]
    ticket.wait()
    gc.collect()
    return {"kept": [*kept, memory() is not None]}


def phases() -> dict[str, Any]:
    hooks = Hooks()
    lines: list[str] = []
    curves: list[tuple[str, float]] = []
    timer = timer_for(torch.device("cuda"))
    assert isinstance(timer, CudaTimer)
    hooks.subscribe(WallClock(2, lines.append, lambda name, ms: curves.append((name, ms)), timer))
    went_on = []
    for hooks.step in range(2):
        device.kernel("head start", 60)
        for hooks.microbatch in range(2):
            with hooks.span("phase", "forward"):
                device.kernel("work", 10)
            with hooks.span("phase", "backward"):
                with hooks.span("phase", "recompute", lane="autograd"):
                    device.kernel("work", 4)
                device.kernel("work", 16)
        with hooks.span("phase", "step"):
            device.kernel(f"step {hooks.step}", 5 * (1 + hooks.step))
        went_on.append(device.now_ns())
    return {"lines": lines, "curves": curves, "went_on": went_on}


def between_lines() -> dict[str, Any]:
    hooks = Hooks()
    lines: list[str] = []
    hooks.subscribe(WallClock(3, lines.append, None, CudaTimer()))
    asked = []
    for hooks.step in range(3):
        asked.append(device.counts()["synchronize"])
        device.kernel("head start", 20)
        with hooks.span("phase", "step"):
            device.kernel("work", 6 + hooks.step)
    return {"lines": lines, "asked": asked}


def asked() -> dict[str, Any]:
    """A stream and an event are asked whether they are over, while a kernel of an hour runs, and when it has."""
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    device.kernel("an hour", 3_600_000)
    event.record()
    busy = stream.query(), event.query()
    device.skip(3_600_000)
    return {"busy": busy, "through": (stream.query(), event.query())}


def day() -> dict[str, Any]:
    """A communication of 0.125 ms every ten minutes; the host is ahead of the last one. As floats, ten minutes go in
    steps of a sixteenth of a ms: a host that takes equally long each time would have all of them rounded alike."""
    hooks, spans = Hooks(), Spans()
    hooks.subscribe(spans)
    lane = CudaLane("gradients", hooks)
    for number in range(24 * 6):
        device.skip(600_000 + number % 16 / 256)
        if number == 24 * 6 - 1:
            device.kernel("head start", 50)
        lane.submit(lambda: device.kernel("brief", 0.125), "all_reduce", **about()).wait()
        lane._timed[-1].end.synchronize()
        lane.poll()
    return {"comm": spans.told("comm")}


def offloaded() -> dict[str, Any]:
    """Shards in host memory: when the third forward began and was over for the host, and how far the first loss is from
    one that was computed on the host."""
    os.environ.pop("RANK")  # a job of its own
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3)))
    loss_on_host = model(torch.ones(1, 512)).sum().item()
    for layer in model:
        layer.register_forward_hook(lambda *_: device.kernel("layer", 20))
    engine = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {
                "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 2 * 512 * 512, "offload_param": {"device": "cpu", "pin_memory": True},
            },
        },
    )[0]  # fmt: skip
    off = []
    for _ in range(3):
        begin = device.now_ns()
        loss = engine(torch.ones(1, 512, device="cuda")).sum()
        end = device.now_ns()
        off.append(abs(loss.item() - loss_on_host))
        engine.backward(loss)
        engine.step()
    return {"begin": begin, "end": end, "off": off[0]}


def ahead() -> dict[str, Any]:
    """A step with clipping while the device is busy: when it began and was over for the host; the norm, and how far
    the weights are from those of one on the host."""
    os.environ.pop("RANK", None)
    model = torch.nn.Linear(8, 8, bias=False)
    other = torch.nn.Linear(8, 8, bias=False)
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    engine = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )[0]
    inputs = torch.ones(2, 8, device="cuda")
    for _ in range(3):
        device.kernel("head start", 60)
        begin = device.now_ns()
        engine.backward(engine(inputs).sum())
        engine.step()
        went_on = device.now_ns()
        optimizer.zero_grad()
        other(torch.ones(2, 8)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5).item()
        optimizer.step()
    off = (model.weight.detach().cpu() - other.weight.detach()).abs().max().item()
    return {"begin": begin, "went_on": went_on, "norms": [engine.get_global_grad_norm(), norm], "off": off}


def after_all(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    told = part()
    torch.cuda.synchronize()
    return told


PARTS = (lane, late_listener, memory, phases, between_lines, asked, day, offloaded, ahead)
told = {part.__name__: after_all(part) for part in PARTS}
Path(f"told.{common.RANK}").write_text(json.dumps({**told, "failures": len(FAILURES), "log": device.log()}))
