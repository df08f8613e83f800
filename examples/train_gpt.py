"""Train a small character-level GPT on the Python standard library's own source; with DistributedDataParallel where
it is started with ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py       # or python examples/train_gpt.py: one process
    dsprof run --nproc-per-node 2 examples/train_gpt.py     # or dsprof run examples/train_gpt.py

It knows nothing of dsprof. The switches under "planted problems" make it slow in ways a profiler should find.
"""

import argparse
import gc
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp(self.norm_2(x_BTD))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT):
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class StandardLibrary(Dataset):
    """Windows of bytes from the source of Python's standard library."""

    def __init__(self, context, size=2_000_000, delay=0.0):
        self.context = context
        self.delay = delay
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= size:
                break
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        if self.delay:
            time.sleep(self.delay)
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def build_index(count):
    """A large Python-side index of the data set: every full garbage collection has to walk all of it."""
    return [{"window": index, "shard": [index % 64]} for index in range(count)]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=6, help="sequences a rank")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss-file", help="rank 0 writes every step's loss here, in full precision")
    planted = parser.add_argument_group("planted problems")
    planted.add_argument("--slow-rank", type=int, metavar="R", help="rank R computes slowly")
    planted.add_argument("--slow-loader", action="store_true", help="reading a sample takes 10 ms")
    planted.add_argument("--bucket-mb", type=float, help="DDP's gradient bucket size (default: its own)")
    planted.add_argument(
        "--gc-pressure", action="store_true", help="rank 0 collects garbage every step, over a large heap"
    )
    planted.add_argument("--uneven-lengths", action="store_true", help="sequence lengths differ between ranks")
    return parser.parse_args()


def main():
    args = parse_args()
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    dataset = StandardLibrary(args.context, delay=0.01 if args.slow_loader else 0.0)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = GPT(256, args.context, args.width, args.heads, args.layers).to(device)
    if args.slow_rank == rank:
        model.register_forward_hook(lambda *_: time.sleep(0.08))
    if distributed:
        model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lengths = torch.Generator().manual_seed(args.seed)

    index = build_index(200_000) if args.gc_pressure and rank == 0 else None
    losses = []
    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if args.uneven_lengths:
                turn = torch.randperm(world_size, generator=lengths)[rank].item()
                length = args.context // 4 + args.context * 3 // 4 * turn // max(world_size - 1, 1)
                inputs, targets = inputs[:, :length], targets[:, :length]
            inputs, targets = inputs.to(device), targets.to(device)

            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if index is not None:
                gc.collect()

            losses.append(loss.item())
            if rank == 0 and step % 10 == 0:
                print(f"step {step:4d}  loss {losses[-1]:.4f}", flush=True)
            step += 1
            if step == args.steps:
                break
        epoch += 1

    if rank == 0:
        ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
        print(f"trained {step} steps on {ranks}, final loss {losses[-1]:.4f}")
        if args.loss_file:
            Path(args.loss_file).write_text("".join(f"{loss!r}\n" for loss in losses))
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
