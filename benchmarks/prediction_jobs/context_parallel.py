"""dsprof's engine on ranks that share sequences, whose keys and values go round: attention by torch, or asleep for as
long as a rank's queries meet keys."""

import argparse
import sys
from pathlib import Path

import torch
from common import Layer, Log, arguments, start, work
from torch import nn
from torch.nn import functional as F

from dsprof import engine as deepspeed
from dsprof.engine.sequence import ring

sys.path.append(str(Path(__file__).resolve().parents[1]))
from block import Block


def parse():
    parser = arguments(__doc__, steps=24)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="positions of a sequence")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--full", action="store_true", help="attention without a causal mask")
    parser.add_argument("--asleep-ms", type=float, default=0.0, help="all queries with all keys, forward; 0: computed")
    parser.add_argument("--mlp-ms", type=float, default=0.0, help="of a rank's positions in a layer, forward, asleep")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.0)
    parser.add_argument("--deepspeed_config", required=True, help="the JSON file")
    return parser.parse_args()


def fall_asleep(whole_ms, length):
    """Have the engine's blocks of attention sleep as long as they have pairs of a query and a key, and compute nothing.
    The backward takes twice as long."""

    def took(query, key, causal):
        return whole_ms * query.shape[2] * key.shape[2] / length**2 * (0.5 if causal else 1.0)

    def block(query, key, value, causal, scale):
        work(took(query, key, causal))
        return query.clone(), query.new_zeros(query.shape[:3], dtype=torch.float32)

    def gradients(grad, query, key, value, out, lse, causal, scale):
        work(2 * took(query, key, causal))
        return grad.clone(), torch.zeros_like(key), torch.zeros_like(value)

    ring.attend_block, ring.block_gradients = block, gradients


class Asleep(nn.Module):
    """x [batch, length, width]."""

    def __init__(self, width, heads, causal, mlp_ms):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.mlp = nn.Linear(width, 3 * width), Layer(width, mlp_ms)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        return x + self.mlp(mixed.reshape(batch, length, width))


class Computed(Block):
    """The same, computed."""

    def __init__(self, width, heads, causal, mlp_ms):
        if not causal:
            raise ValueError("the block that computes has a causal mask")
        super().__init__(width, heads)


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x, y):
        return F.mse_loss(self.blocks(x), y)


def main():
    args = parse()
    rank, _ = start()
    slow = args.slow_by if rank == args.slow_rank else 1.0
    if args.asleep_ms:
        fall_asleep(args.asleep_ms * slow, args.length)
    kind = Asleep if args.asleep_ms else Computed
    model = Model([kind(args.width, args.width // 32, not args.full, args.mlp_ms * slow) for _ in range(args.layers)])
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(deepspeed_config=args.deepspeed_config, local_rank=rank), model=model,
        model_parameters=model.parameters(),
    )  # fmt: skip
    data, log = torch.Generator().manual_seed(0), Log(args.log)
    for _ in range(args.steps):
        x = torch.randn(1, args.length, args.width, generator=data)
        loss = engine(*engine.shard_sequence((x, x.roll(1, 1))))
        engine.backward(loss)
        engine.step()
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
