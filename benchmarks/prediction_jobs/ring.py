"""Ring attention: every layer passes its keys around the ranks while it works on those it has. One rank may be slow."""

import torch
import torch.distributed as dist
from common import Log, arguments, start, work
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def around(held, by, hop_ms, of):
    """Sum of `of(block)` over all ranks' blocks: one hop after the other, each beside the work on the block at hand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.zeros_like(held)
    for hop in range(ranks):
        last = hop == ranks - 1
        arriving, requests = held, ()
        if not last:
            arriving = torch.empty_like(held)
            requests = dist.isend(held, (rank + by) % ranks), dist.irecv(arriving, (rank - by) % ranks)
        total = total + of(held)
        work(hop_ms)
        for request in requests:
            request.wait()
        held = arriving
    return total


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, hop_ms):
        ctx.hop_ms = hop_ms
        ctx.save_for_backward(block)
        return around(block.detach().contiguous(), 1, hop_ms, torch.tanh)

    @staticmethod
    def backward(ctx, gradient):
        (block,) = ctx.saved_tensors
        slope = 1 - torch.tanh(block) ** 2
        return around(gradient.contiguous(), -1, 2 * ctx.hop_ms, lambda held: held * slope), None


class RingLayer(nn.Module):
    def __init__(self, width, hop_ms):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.hop_ms = hop_ms

    def forward(self, x):
        return Ring.apply(self.linear(x), self.hop_ms) / dist.get_world_size()


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hop-ms", type=float, default=4.0, help="of forward; backward takes twice that")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.0)
    args = parser.parse_args()
    rank, _ = start()
    log = Log(args.log)

    hop_ms = args.hop_ms * (args.slow_by if rank == args.slow_rank else 1.0)
    model = DistributedDataParallel(nn.Sequential(*(RingLayer(32, hop_ms) for _ in range(args.layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        inputs = torch.randn(8, 32, generator=batches)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
