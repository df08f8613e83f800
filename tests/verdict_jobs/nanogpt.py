"""A loop in nanoGPT's manner: batches cut from one long array, micro-steps, rank 0 alone estimates the loss."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import Layer, Log, arguments, finish, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GPT(nn.Module):
    def __init__(self, vocabulary, width, layers, forward_ms):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width, forward_ms / layers) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.token(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--eval-iters", type=int, default=20)
    parser.add_argument("--micro-steps", type=int, default=2, help="gradient accumulation")
    parser.add_argument("--forward-ms", type=float, default=8.0)
    args = parser.parse_args()
    rank, _ = start(args.seed)
    master_process = rank == 0
    log = Log(args)

    data = torch.randint(64, (20_000,), generator=torch.Generator().manual_seed(args.seed))
    draw = torch.Generator().manual_seed(args.seed + 1 + rank)

    def get_batch():
        starts = torch.randint(len(data) - 33, (4,), generator=draw)
        x = torch.stack([data[i : i + 32] for i in starts])
        y = torch.stack([data[i + 1 : i + 33] for i in starts])
        return x, y

    model = DistributedDataParallel(GPT(64, 32, 4, args.forward_ms))
    raw_model = model.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            _, loss = raw_model(*get_batch())
            losses[k] = loss.item()
        model.train()
        return losses.mean()

    X, Y = get_batch()
    for iter_num in range(args.steps):
        if iter_num % args.eval_interval == 0 and master_process:
            estimate_loss()
        for micro_step in range(args.micro_steps):
            last = micro_step == args.micro_steps - 1
            with nullcontext() if last else model.no_sync():
                _, loss = model(X, Y)
                loss = loss / args.micro_steps
                X, Y = get_batch()
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(loss.item() * args.micro_steps)
    finish(log)


if __name__ == "__main__":
    main()
