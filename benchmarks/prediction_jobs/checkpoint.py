"""DistributedDataParallel over a large frozen table; every few steps rank 0 saves the whole state to a slow disk."""

import copy
import io
import tempfile
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Log, arguments, layers, sleep, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FineTuned(nn.Module):
    def __init__(self, megabytes, width, count, forward_ms):
        super().__init__()
        self.table = nn.Embedding(megabytes * 1_000_000 // (4 * width), width)
        self.table.weight.requires_grad_(False)
        self.head = nn.Sequential(*layers(width, count, forward_ms))

    def forward(self, tokens):
        return self.head(self.table(tokens))


class SlowFile(io.FileIO):
    """A file whose disk takes so many megabytes a second and no more."""

    def __init__(self, path, megabytes_per_s):
        super().__init__(path, "wb")
        self.ms_per_byte = 1e-3 / megabytes_per_s

    def write(self, data):
        sleep(len(data) * self.ms_per_byte)
        return super().write(data)


def save(state, path, megabytes_per_s):
    with SlowFile(path, megabytes_per_s) as file:
        torch.save(state, file)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--megabytes-per-s", type=float, default=100.0)
    parser.add_argument("--asynchronous", action="store_true", help="save a copy while training goes on")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    rank, _ = start()
    log = Log(args.log)

    model = DistributedDataParallel(FineTuned(args.megabytes, args.width, args.layers, args.forward_ms))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    batches = torch.Generator().manual_seed(rank)
    saving = threading.Thread()
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(1000, (8,), generator=batches)
            outputs = model(tokens)
            loss = F.mse_loss(outputs, torch.zeros_like(outputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.every == 0 and rank == 0:
                state, to = {"model": model.module.state_dict(), "step": step}, Path(folder) / "state.pt"
                if args.asynchronous:
                    if saving.ident is not None:
                        saving.join()
                    saving = threading.Thread(target=save, args=(copy.deepcopy(state), to, args.megabytes_per_s))
                    saving.start()
                else:
                    save(state, to, args.megabytes_per_s)
            log.step()
        if saving.ident is not None:
            saving.join()
    log.finish()


if __name__ == "__main__":
    main()
