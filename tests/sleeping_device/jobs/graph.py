"""A whole step (forward, backward, an all-reduce of the gradients, the optimizer) captured into a CUDA graph, in the
first step or after some, and replayed in the others."""

from __future__ import annotations

import sys

import common
import sleeping_device as device
import torch

FIRST = int(sys.argv[1])
"""The step that is captured; those before it are not."""

if common.WORLD > 1:
    common.join()
device.set_link(2000, 1000)
model = common.model(2, 16, 2, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.ones(4, 16, device="cuda")
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
static_loss = torch.zeros((), device="cuda")


def compute() -> None:
    optimizer.zero_grad(set_to_none=False)
    loss = model(data).square().mean()
    loss.backward()
    if common.WORLD > 1:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    optimizer.step()
    static_loss.copy_(loss.detach())


def step(number: int) -> torch.Tensor:
    if number < FIRST:
        compute()
    elif number == FIRST:
        with torch.cuda.graph(graph, stream=stream):
            compute()
        graph.replay()
    else:
        graph.replay()
    return static_loss.clone()


common.train(step, FIRST + 10)
