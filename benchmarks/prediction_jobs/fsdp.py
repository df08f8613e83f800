"""FSDP2: a slow rank, or many small units."""

import torch
import torch.nn.functional as F
from common import Log, Slowed, add_link, arguments, layers, slow_link, start
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--together", type=int, default=1, help="layers a unit")
    add_link(parser)
    Slowed.add_arguments(parser)
    args = parser.parse_args()
    rank, _ = start()
    log = Log(args.log)

    each = layers(args.width, args.layers, args.forward_ms)
    units = [nn.Sequential(*each[i : i + args.together]) for i in range(0, len(each), args.together)]
    model = nn.Sequential(*units)
    for unit in units:
        fully_shard(unit)
    fully_shard(model)
    slowed = Slowed(model, args, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    batches = torch.Generator().manual_seed(rank)
    for number in range(args.steps):
        slowed.step(number)
        inputs = torch.randn(8, args.width, generator=batches)
        loss = F.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == 1:
            slow_link(args)
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
