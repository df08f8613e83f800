"""Train the example's GPT over pipeline stages, replicas and tensor-parallel ranks at once.

    dsprof run --nproc-per-node 8 examples/train_3d.py                      # 2 stages x 2 replicas x 2 tensor-parallel
    dsprof run --nproc-per-node 4 examples/train_3d.py --tensor 1 --schedule zero-bubble

The layers are plain PyTorch: which rank has which of them, and which part of each, is decided by the engine.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from train_gpt import Block, StandardLibrary

from dsprof import engine as deepspeed
from dsprof.engine.pipe import LayerSpec, PipelineModule


class Embedding(nn.Module):
    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens_BT):
        return self.token(tokens_BT) + self.position(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))


class Head(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x_BTD):
        return self.linear(self.norm(x_BTD))


def loss_fn(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "zero-bubble"])
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage, over the replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()

    deepspeed.init_distributed()
    layers = [
        LayerSpec(Embedding, 256, args.context, args.width),
        *(LayerSpec(Block, args.width, 4) for _ in range(args.layers)),
        LayerSpec(Head, 256, args.width),
    ]
    model = PipelineModule(layers, num_stages=args.stages, loss_fn=loss_fn, seed_layers=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": args.zero},
        "pipeline": {"schedule": args.schedule},
        "tensor_parallel": {"autotp_size": args.tensor},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=StandardLibrary(args.context))
    if engine.global_rank == 0:
        print(engine.parallel.mesh)
    for step in range(1, args.steps + 1):
        loss = engine.train_batch()
        if engine.global_rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} gradient norm {engine.get_global_grad_norm():.3f}")


if __name__ == "__main__":
    main()
