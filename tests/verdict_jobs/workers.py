"""DistributedDataParallel whose loader starts its workers anew every epoch; each has a data base to open first."""

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start, work
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class OpenDatabase:
    """Run in each worker as it starts."""

    def __init__(self, ms):
        self.ms = ms

    def __call__(self, worker):
        torch.set_num_threads(1)
        work(self.ms)


def main():
    parser = arguments(__doc__, steps=80)
    parser.add_argument("--epoch", type=int, default=10, help="steps of an epoch")
    parser.add_argument("--open-ms", type=float, default=400.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--forward-ms", type=float, default=14.0)
    args = parser.parse_args()
    _, ranks = start(args.seed)
    log = Log(args)

    x = torch.randn(8 * ranks * args.epoch, 32)
    samples = TensorDataset(x, x.flip(1))
    sampler = DistributedSampler(samples, seed=args.seed)
    loader = DataLoader(
        samples,
        batch_size=8,
        sampler=sampler,
        num_workers=args.workers,
        worker_init_fn=OpenDatabase(args.open_ms),
        persistent_workers=args.persistent,
    )
    model = DistributedDataParallel(mlp(32, 4, args.forward_ms))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.steps // args.epoch):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
