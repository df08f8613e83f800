"""Ring attention: every layer passes its keys around the ranks while it works on those it has."""

import torch
import torch.distributed as dist
from common import Log, arguments, finish, start, work
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def shift(block, by):
    """Begin to send `block` to the rank `by` places on; what comes from the other side, and what to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(block)
    sending = dist.isend(block, (rank + by) % ranks)
    receiving = dist.irecv(arriving, (rank - by) % ranks)
    return arriving, (sending, receiving)


class Ring(torch.autograd.Function):
    """Sum over all ranks' blocks: one hop after the other, each beside the work on the block at hand."""

    @staticmethod
    def forward(ctx, block, hop_ms):
        ctx.hop_ms = hop_ms
        total, held = torch.zeros_like(block), block.detach().contiguous()
        for hop in range(dist.get_world_size()):
            last = hop == dist.get_world_size() - 1
            arriving, requests = (held, ()) if last else shift(held, 1)
            total = total + torch.tanh(held)
            work(hop_ms)
            for request in requests:
                request.wait()
            held = arriving
        ctx.save_for_backward(block)
        return total

    @staticmethod
    def backward(ctx, gradient):
        (block,) = ctx.saved_tensors
        total, held = torch.zeros_like(gradient), gradient.contiguous()
        for hop in range(dist.get_world_size()):
            last = hop == dist.get_world_size() - 1
            arriving, requests = (held, ()) if last else shift(held, -1)
            total = total + held * (1 - torch.tanh(block) ** 2)
            work(2 * ctx.hop_ms)
            for request in requests:
                request.wait()
            held = arriving
        return total, None


class RingLayer(nn.Module):
    def __init__(self, width, hop_ms):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.hop_ms = hop_ms

    def forward(self, x):
        return Ring.apply(self.linear(x), self.hop_ms) / dist.get_world_size()


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hop-ms", type=float, default=2.0, help="of forward; backward takes twice that")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.6)
    args = parser.parse_args()
    rank, _ = start(args.seed)
    log = Log(args)

    hop_ms = args.hop_ms * (args.slow_by if rank == args.slow_rank else 1.0)
    model = DistributedDataParallel(nn.Sequential(*(RingLayer(32, hop_ms) for _ in range(args.layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(args.seed + rank)
    for _ in range(args.steps):
        inputs = torch.randn(8, 32, generator=batches)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
