"""A small language model whose layers are sharded over two ranks, with curves for TensorBoard, after DeepSpeed's
tutorials.

    deepspeed --num_gpus 2 tensor_parallel.py --deepspeed_config tensor_parallel.json
    dsprof run --engine dsprof --num_gpus 2 tensor_parallel.py --deepspeed_config tensor_parallel.json

It knows nothing of dsprof.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.self_attn = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.self_attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=256, context=64, width=64, heads=4, layers=4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, labels):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


class Text(torch.utils.data.Dataset):
    """Stretches of this file, byte by byte, and the same one byte on."""

    def __init__(self, context=64):
        self.bytes = torch.tensor(list(Path(__file__).read_bytes()))
        self.context = context

    def __len__(self):
        return len(self.bytes) - self.context - 1

    def __getitem__(self, index):
        stretch = self.bytes[index : index + self.context + 1]
        return stretch[:-1], stretch[1:]


@dataclass
class ModelParallelUnit:
    """Which ranks share each layer, and which train on other data."""

    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    tp_size: int
    dp_size: int
    tp_rank: int
    dp_rank: int

    def get_data_parallel_group(self):
        return self.dp_group

    def get_model_parallel_group(self):
        return self.tp_group

    def get_data_parallel_world_size(self):
        return self.dp_size

    def get_model_parallel_world_size(self):
        return self.tp_size

    def get_data_parallel_rank(self):
        return self.dp_rank

    def get_model_parallel_rank(self):
        return self.tp_rank


def build_mpu(tp_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tp_group = dp_group = None
    for first in range(0, world_size, tp_size):
        ranks = list(range(first, first + tp_size))
        group = dist.new_group(ranks)
        tp_group = group if rank in ranks else tp_group
    for first in range(tp_size):
        ranks = list(range(first, world_size, tp_size))
        group = dist.new_group(ranks)
        dp_group = group if rank in ranks else dp_group
    return ModelParallelUnit(tp_group, dp_group, tp_size, world_size // tp_size, rank % tp_size, rank // tp_size)


def get_args():
    parser = argparse.ArgumentParser(description="tensor parallelism")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("--tp_size", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=42)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(args.seed)

    model = LanguageModel()
    engine, _, dataloader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Text(),
        mpu=build_mpu(args.tp_size),
    )
    data_iter = iter(deepspeed.utils.RepeatingLoader(dataloader))
    engine.train()
    for step in range(args.steps):
        tokens, labels = (part.to(engine.device) for part in next(data_iter))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and (step + 1) % 10 == 0:
            print(f"step={step + 1} loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
