"""DistributedDataParallel on one core, where every forward really computes: by its own CPU time, so that what else runs
there makes it longer."""

import os
import time

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, start
from torch.nn.parallel import DistributedDataParallel


class Spin(torch.nn.Module):
    """x [batch, width] -> its product, after so many ms of CPU time."""

    def __init__(self, width, cpu_ms):
        super().__init__()
        self.linear, self.cpu_ms = torch.nn.Linear(width, width), cpu_ms

    def forward(self, x):
        until = time.thread_time() + self.cpu_ms / 1e3
        while time.thread_time() < until:
            pass
        return self.linear(x)


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--core", type=int, help="on which all ranks run; the system's choice by default")
    parser.add_argument("--cpu-ms", type=float, default=6.0)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    start(args.seed)
    log = Log(args)
    model = DistributedDataParallel(Spin(16, args.cpu_ms))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.steps):
        optimizer.zero_grad()
        x = torch.randn(4, 16)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
