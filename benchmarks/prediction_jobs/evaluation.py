"""DistributedDataParallel with a validation every few steps, on rank 0 alone or shared out to all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Log, arguments, layers, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def validate(model, batches):
    model.eval()
    losses = [F.mse_loss(model(inputs), inputs.flip(1)) for inputs in batches]
    model.train()
    return torch.stack(losses).mean()


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--every", type=int, default=3, help="steps between two validations")
    parser.add_argument("--batches", type=int, default=8, help="of one validation")
    parser.add_argument("--shared", action="store_true", help="each rank validates a part of the batches")
    parser.add_argument("--forward-ms", type=float, default=15.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    rank, ranks = start()
    log = Log(args.log)

    held_out = torch.randn(args.batches, 8, args.width)
    model = DistributedDataParallel(nn.Sequential(*layers(args.width, args.layers, args.forward_ms)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        inputs = torch.randn(8, args.width, generator=batches)
        loss = F.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            if args.shared:
                mean = validate(model.module, held_out[rank::ranks])
                dist.all_reduce(mean)
            elif rank == 0:
                validate(model.module, held_out)
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
