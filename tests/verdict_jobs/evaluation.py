"""DistributedDataParallel with a validation every few steps, on rank 0 alone or shared out to all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [F.mse_loss(model(inputs), targets) for inputs, targets in loader]
    model.train()
    return torch.stack(losses).mean()


def main():
    parser = arguments(__doc__, steps=80)
    parser.add_argument("--every", type=int, default=2, help="steps between two validations")
    parser.add_argument("--batches", type=int, default=6, help="of one validation")
    parser.add_argument("--validates", choices=["rank 0", "all ranks"], default="rank 0")
    parser.add_argument("--forward-ms", type=float, default=14.0)
    args = parser.parse_args()
    rank, ranks = start(args.seed)
    log = Log(args)

    x = torch.randn(16 * 8 * ranks, 32)
    train_set = TensorDataset(x, x.flip(1))
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    v = torch.randn(8 * args.batches, 32)
    validation_loader = DataLoader(TensorDataset(v, v.flip(1)), batch_size=8)

    model = DistributedDataParallel(mlp(32, 4, args.forward_ms))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        sampler.set_epoch(step)
        for inputs, targets in train_loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.every == 0:
                if args.validates == "all ranks":
                    mean = validate(model.module, validation_loader)
                    dist.all_reduce(mean)
                elif rank == 0:
                    validate(model.module, validation_loader)
            log.step(loss.item())
            if step == args.steps:
                break
    finish(log)


if __name__ == "__main__":
    main()
