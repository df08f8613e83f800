"""DistributedDataParallel: a slow rank, a slow loader, buckets too small or too large, garbage, unequal lengths."""

import gc
import random

import torch
import torch.nn.functional as F
from common import Log, Samples, Slowed, add_link, arguments, layers, slow_link, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def parse():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards for each step of the optimizer")
    parser.add_argument("--buffer-mb", type=float, default=0.0, help="of buffers, which rank 0 sends to the others")
    add_link(parser)
    Slowed.add_arguments(parser)
    Samples.add_arguments(parser)
    parser.add_argument("--heap", type=int, default=0, help="objects that rank 0 holds, and walks for garbage")
    parser.add_argument("--collect-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--freeze", action="store_true", help="gc.freeze() before the loop")
    parser.add_argument("--lengths", type=int, nargs=2, metavar=("SHORTEST", "LONGEST"), help="of a rank's sequences")
    parser.add_argument("--alike", action="store_true", help="every rank gets the mean length of the step")
    return parser.parse_args()


class OfLength(nn.Module):
    """Layers whose time goes with the length of their input, [batch, length, width]; `usual` takes the usual time."""

    def __init__(self, body, usual):
        super().__init__()
        self.body = body
        self.usual = usual

    def forward(self, x):
        for layer in self.body:
            layer.times = x.shape[1] / self.usual
        return self.body(x)


def main():
    args = parse()
    rank, ranks = start()
    log = Log(args.log)

    samples = Samples(args.batch_size * ranks * args.steps * args.accumulate, args.width, args.read_ms, args.decode_ms)
    sampler = DistributedSampler(samples)
    loader = DataLoader(
        samples,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )

    net = nn.Sequential(*layers(args.width, args.layers, args.forward_ms))
    slowed = Slowed(net, args, rank)
    if args.lengths:
        net = OfLength(net, sum(args.lengths) / 2)
    if args.buffer_mb:
        net.register_buffer("statistics", torch.zeros(int(args.buffer_mb * 250_000)))
    model = DistributedDataParallel(net, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    index = [{"window": number, "shard": [number]} for number in range(args.heap // 2)] if rank == 0 else []
    if args.freeze:
        gc.collect()
        gc.freeze()

    draw = random.Random(0)
    for number, (inputs, targets) in enumerate(loader):
        if args.lengths:
            lengths = [draw.randint(*args.lengths) for _ in range(ranks)]
            length = round(sum(lengths) / ranks) if args.alike else lengths[rank]
            inputs, targets = (x[:, None].expand(-1, length, -1) for x in (inputs, targets))
        else:
            slowed.step(number)
        loss = F.mse_loss(model(inputs), targets)
        if number % args.accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        if number % args.accumulate != args.accumulate - 1:
            continue
        optimizer.step()
        if number == 2 * args.accumulate - 1:
            slow_link(args)
        if index and number % args.collect_every == 0:
            gc.collect()
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
