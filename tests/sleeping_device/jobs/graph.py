"""A step captured into a CUDA graph, in the step of the first argument, and replayed in the others. The second argument
tells what of it: all (forward, backward, an all-reduce of the gradients, the optimizer), the optimizer, or nothing,
since CUDA refuses to begin on this stream."""

from __future__ import annotations

import sys

import common
import sleeping_device as device
import torch

FIRST, WHAT = int(sys.argv[1]), sys.argv[2]

if common.WORLD > 1:
    common.join()
device.set_link(2000, 1000)
model = common.model(2, 16, 2, 4)
optimizer = common.Sgd(model.parameters(), 0.01)
data = torch.ones(4, 16, device="cuda")
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
static_loss = torch.zeros((), device="cuda")


def gradients() -> None:
    optimizer.zero_grad(set_to_none=False)
    with common.phase("forward"):
        output = model(data)
    loss = output.square().mean()
    with common.phase("backward"):
        loss.backward()
    if common.WORLD > 1:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    static_loss.copy_(loss.detach())


def update() -> None:
    optimizer.step()


def everything() -> None:
    gradients()
    update()


def refuse() -> None:
    try:
        graph.capture_begin()
    except RuntimeError:  # it captures nothing on the default stream
        return
    raise AssertionError("a capture has begun that CUDA refuses")


def step(number: int) -> torch.Tensor:
    if WHAT == "nothing" and number == FIRST:
        refuse()
    if WHAT == "nothing" or number < FIRST:
        everything()
        return static_loss.clone()
    if WHAT == "optimizer":
        gradients()
    if number == FIRST:
        with torch.cuda.graph(graph, stream=stream):
            everything() if WHAT == "all" else update()
    graph.replay()
    return static_loss.clone()


common.train(step, FIRST + 10, head_start_ms=20)
if common.WORLD > 1:
    torch.distributed.destroy_process_group()
