"""Loops that are like few others, by name."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from steps import STEPS, Block, make_batches, make_model, write_losses
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Plain(torch.optim.Optimizer):
    """One of the script's own."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


def forward_only(batches: list[Tensor]) -> list[float]:
    model = make_model()
    losses = []
    with torch.no_grad():
        for batch in batches:
            loss = model(batch).pow(2).mean()
            dist.all_reduce(loss)
            losses.append(loss.item())
    return losses


def no_optimizer(batches: list[Tensor]) -> list[float]:
    model = DistributedDataParallel(make_model())
    losses = []
    for batch in batches:
        loss = model(batch).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def several_optimizers(batches: list[Tensor]) -> list[float]:
    blocks = make_model()
    model = DistributedDataParallel(blocks)
    optimizers = [Plain(list(blocks[0].parameters())), torch.optim.Adam(blocks[1:].parameters())]
    losses = []
    for batch in batches:
        loss = model(batch).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizers_in_backward(batches: list[Tensor]) -> list[float]:
    """One for each parameter, stepped as soon as its gradient has been reduced."""
    model = make_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for batch in batches:
        loss = model(batch).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def threads(batches: list[Tensor]) -> list[float]:
    """The model has a group of its own, and so has each of two threads that communicate all the while."""
    own, *others = (dist.new_group([0, 1]) for _ in range(3))
    model = DistributedDataParallel(torch.nn.Sequential(Block(), Block()), process_group=own)
    optimizer = torch.optim.Adam(model.parameters())
    rounds = threading.Barrier(3)

    def communicate(group: dist.ProcessGroup) -> None:
        for _ in batches:
            rounds.wait()
            for _ in range(10):
                dist.all_reduce(torch.ones(64), group=group)

    beside = [threading.Thread(target=communicate, args=(group,)) for group in others]
    for thread in beside:
        thread.start()
    losses = []
    for batch in batches:
        rounds.wait()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for thread in beside:
        thread.join()
    return losses


torch.manual_seed(0)
dist.init_process_group("gloo")
write_losses(globals()[sys.argv[1]](make_batches(STEPS, dist.get_rank())))
dist.destroy_process_group()
