"""A mixture of experts: each rank has one, and a router sends it more or fewer of all ranks' tokens."""

import torch
import torch.distributed as dist
from common import Log, arguments, finish, start, work
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOKENS, WIDTH = 256, 32


def exchange(rows, sent, came):
    """Rows [sum of `sent`, width] -> [sum of `came`, width]: so many to, and from, each rank."""
    arrived = rows.new_empty(sum(came), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), came, sent)
    return arrived


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, came):
        ctx.sent, ctx.came = sent, came
        return exchange(rows, sent, came)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.came, ctx.sent), None, None


class Work(torch.autograd.Function):
    """As long as there are rows; backward takes twice that."""

    @staticmethod
    def forward(ctx, rows, row_us, kind):
        ctx.ms, ctx.kind = row_us * len(rows) / 1e3, kind
        work(ctx.ms, kind)
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        work(2 * ctx.ms, ctx.kind)
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, row_us):
        super().__init__()
        self.dense, self.expert, self.row_us = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), row_us

    def forward(self, rows, sent):
        rows = Work.apply(self.dense(rows), self.row_us / 3, "compute")
        came = [sent[dist.get_rank()]] * dist.get_world_size()
        mine = Exchange.apply(rows, sent, came)
        mine = Work.apply(self.expert(mine), self.row_us, "expert")
        return rows + Exchange.apply(mine, came, sent)


class Experts(nn.Module):
    def __init__(self, layers, row_us):
        super().__init__()
        self.layers = nn.ModuleList(Layer(row_us) for _ in range(layers))

    def forward(self, rows, sent):
        for layer in self.layers:
            rows = layer(rows, sent)
        return rows


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--row-us", type=float, default=60.0, help="what a token takes an expert in forward")
    parser.add_argument("--hot-rank", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.5, help="of the tokens, that the hot rank's expert gets")
    args = parser.parse_args()
    rank, ranks = start(args.seed)
    log = Log(args)

    model = DistributedDataParallel(Experts(args.layers, args.row_us))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(args.seed + rank)
    router = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        hot = int(TOKENS * (args.share + 0.04 * (torch.rand(1, generator=router).item() - 0.5)))
        sent = [(TOKENS - hot) // (ranks - 1)] * ranks
        sent[args.hot_rank] = TOKENS - sum(sent) + sent[args.hot_rank]
        inputs = torch.randn(TOKENS, WIDTH, generator=batches)
        loss = model(inputs, sent).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
