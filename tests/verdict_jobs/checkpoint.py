"""DistributedDataParallel fine-tuning over a large frozen table; every few steps the whole state is saved.

The file system takes so many megabytes a second and no more, as one behind a network does.
"""

import io
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start, work
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FineTuned(nn.Module):
    def __init__(self, megabytes, forward_ms):
        super().__init__()
        self.table = nn.Embedding(megabytes * 1_000_000 // (4 * 64), 64)
        self.table.weight.requires_grad_(False)
        self.head = mlp(64, 4, forward_ms)

    def forward(self, tokens):
        return self.head(self.table(tokens))


class SlowFile(io.FileIO):
    """A file whose writes take their time."""

    def __init__(self, path, megabytes_per_s):
        super().__init__(path, "wb")
        self.ms_per_byte = 1e-3 / megabytes_per_s

    def write(self, data):
        work(len(data) * self.ms_per_byte, "checkpoint")
        return super().write(data)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--megabytes", type=int, default=160)
    parser.add_argument("--megabytes-per-s", type=float, default=1000.0)
    parser.add_argument("--saves", choices=["rank 0", "all ranks"], default="rank 0")
    parser.add_argument("--forward-ms", type=float, default=16.0)
    args = parser.parse_args()
    rank, _ = start(args.seed)
    log = Log(args)

    model = DistributedDataParallel(FineTuned(args.megabytes, args.forward_ms))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    batches = torch.Generator().manual_seed(args.seed + rank)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(1000, (8,), generator=batches)
            outputs = model(tokens)
            loss = F.mse_loss(outputs, torch.zeros_like(outputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.every == 0 and (rank == 0 or args.saves == "all ranks"):
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                with SlowFile(Path(folder) / f"rank{rank}.pt", args.megabytes_per_s) as file:
                    torch.save(state, file)
            log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
