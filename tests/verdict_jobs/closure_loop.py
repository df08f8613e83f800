"""A training loop as Lightning's: `optimizer.step` is given a closure that does all of a step, amid callbacks;
each epoch is validated on all ranks and ends with a checkpoint, and a metric is averaged every so many steps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Module(torch.nn.Module):
    """Training and validation both go through `forward`, which is what DDP wraps."""

    def __init__(self, forward_ms):
        super().__init__()
        self.net = mlp(32, 4, forward_ms)

    def forward(self, step, batch):
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs), targets)
        return {"loss": loss, "log": {f"{step}_loss": loss.detach()}}


class Metrics:
    """Averages over the ranks what was logged, every so many steps."""

    def __init__(self, every):
        self.every, self.seen = every, 0

    def on_batch_end(self, output):
        self.seen += 1
        if self.seen % self.every == 0:
            value = output["log"]["training_loss"].clone()
            dist.all_reduce(value)


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def on_epoch_end(self, trainer):
        if trainer.rank == 0 and self.path is not None:
            states = {"module": trainer.module.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            torch.save(states, self.path)
        dist.barrier()


class Trainer:
    def __init__(self, module, args, rank, log):
        self.module, self.rank, self.log = module, rank, log
        self.wrapped = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.metrics = Metrics(args.log_every)
        self.checkpoint = Checkpoint(args.results.with_name("last.ckpt") if args.results else None)

    def fit(self, training, validation, epochs):
        self.validate(validation, 2)
        for epoch in range(epochs):
            training.sampler.set_epoch(epoch)
            self.wrapped.train()
            for batch in training:
                output = {}

                def closure(batch=batch, output=output):
                    output |= self.wrapped("training", batch)
                    self.optimizer.zero_grad()
                    output["loss"].backward()
                    return output["loss"]

                self.optimizer.step(closure)
                self.scheduler.step()
                self.metrics.on_batch_end(output)
                self.log.step(output["loss"].item())
            self.validate(validation, 5)
            self.checkpoint.on_epoch_end(self)

    @torch.no_grad()
    def validate(self, loader, batches):
        self.wrapped.eval()
        total = torch.zeros(())
        for _, batch in zip(range(batches), loader, strict=False):
            total += self.wrapped("validation", batch)["log"]["validation_loss"]
        dist.all_reduce(total)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--epoch", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    args = parser.parse_args()
    rank, ranks = start(args.seed)
    log = Log(args)

    def loader(steps):
        x = torch.randn(8 * ranks * steps, 32)
        samples = TensorDataset(x, x.flip(1))
        return DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, seed=args.seed))

    Trainer(Module(args.forward_ms), args, rank, log).fit(loader(args.epoch), loader(5), args.steps // args.epoch)
    finish(log)


if __name__ == "__main__":
    main()
