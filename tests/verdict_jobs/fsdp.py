"""FSDP2 over many small layers, each a unit of its own, or over a few large ones."""

import torch
import torch.nn.functional as F
from common import Layer, Log, arguments, finish, start
from torch.distributed.fsdp import fully_shard


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--forward-ms", type=float, default=0.3, help="of one layer")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.3)
    args = parser.parse_args()
    rank, _ = start(args.seed)
    log = Log(args)

    forward_ms = args.forward_ms * (args.slow_by if rank == args.slow_rank else 1.0)
    model = torch.nn.Sequential(*(Layer(args.width, forward_ms) for _ in range(args.layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = torch.Generator().manual_seed(args.seed + rank)
    for _ in range(args.steps):
        inputs = torch.randn(8, args.width, generator=batches)
        loss = F.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
