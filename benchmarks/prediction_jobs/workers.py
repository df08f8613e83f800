"""DistributedDataParallel whose loader starts its workers anew every epoch; each has a data base to open first."""

import torch
import torch.nn.functional as F
from common import Log, Samples, arguments, layers, sleep, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class OpenDatabase:
    """Run in each worker as it starts."""

    def __init__(self, ms):
        self.ms = ms

    def __call__(self, worker):
        torch.set_num_threads(1)
        sleep(self.ms)


def main():
    parser = arguments(__doc__, steps=64)
    parser.add_argument("--epoch", type=int, default=8, help="steps of an epoch")
    parser.add_argument("--open-ms", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--forward-ms", type=float, default=15.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    _, ranks = start()
    log = Log(args.log)

    samples = Samples(8 * ranks * args.epoch, args.width)
    sampler = DistributedSampler(samples)
    loader = DataLoader(
        samples,
        batch_size=8,
        sampler=sampler,
        num_workers=args.workers,
        worker_init_fn=OpenDatabase(args.open_ms),
        persistent_workers=args.persistent,
    )
    model = DistributedDataParallel(nn.Sequential(*layers(args.width, args.layers, args.forward_ms)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(args.steps // args.epoch):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step()
    log.finish()


if __name__ == "__main__":
    main()
