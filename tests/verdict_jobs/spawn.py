"""DistributedDataParallel as in torch's tutorial on several GPUs: `torch.multiprocessing.spawn` starts the ranks, and
rank 0 saves a snapshot after each epoch."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import Log, arguments, finish, mlp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, rank, log, snapshot):
        self.rank, self.loader, self.optimizer, self.log, self.snapshot = rank, loader, optimizer, log, snapshot
        self.model = DistributedDataParallel(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.log.step(loss.item())

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            if self.rank == 0 and self.snapshot is not None:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.snapshot)


def rank_main(rank, args, port):
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    log = Log(args)
    x = torch.randn(8 * args.ranks * args.epoch, 32)
    samples = TensorDataset(x, x.flip(1))
    loader = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, seed=args.seed))
    model = mlp(32, 4, args.forward_ms)
    snapshot = args.results.with_name("snapshot.pt") if args.results else None
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-2), rank, log, snapshot)
    trainer.train(args.steps // args.epoch)
    finish(log)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epoch", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--forward-ms", type=float, default=16.0)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(rank_main, args=(args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
