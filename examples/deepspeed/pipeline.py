"""A small convolutional network as a pipeline of two stages, as DeepSpeed's tutorial trains AlexNet.

    deepspeed --num_gpus 2 pipeline.py --deepspeed_config pipeline.json
    dsprof run --engine dsprof --num_gpus 2 pipeline.py --deepspeed_config pipeline.json

It knows nothing of dsprof.
"""

import argparse
import os

import deepspeed
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule


class Shapes(torch.utils.data.Dataset):
    """Noisy pictures [3, 16, 16] of ten patterns: something to learn that need not be downloaded."""

    def __init__(self, length=2048):
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 3, 16, 16, generator=generator)
        self.labels = torch.randint(10, (length,), generator=generator)
        self.pictures = patterns[self.labels] + torch.randn(length, 3, 16, 16, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


def layers():
    """Built on the ranks that have them, and nowhere else."""
    return [
        LayerSpec(nn.Conv2d, 3, 16, 5, padding=2),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.MaxPool2d, 2),
        LayerSpec(nn.Conv2d, 16, 32, 5, padding=2),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.MaxPool2d, 2),
        lambda x: torch.flatten(x, 1),
        LayerSpec(nn.Linear, 32 * 4 * 4, 120),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 120, 84),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 84, 10),
    ]


def get_args():
    parser = argparse.ArgumentParser(description="a pipeline")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("-s", "--steps", type=int, default=60, help="quit after this many steps")
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2, help="pipeline parallelism")
    parser.add_argument("--seed", type=int, default=1138, help="PRNG seed")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(args.local_rank)
    deepspeed.runtime.utils.set_random_seed(args.seed)

    net = PipelineModule(
        layers=layers(),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Shapes(),
    )
    for step in range(args.steps):
        loss = engine.train_batch()
        if engine.global_rank == 0 and (step + 1) % 10 == 0:
            print(f"step: {step + 1:3d} / {args.steps:3d} loss: {loss:.3f}")


if __name__ == "__main__":
    main()
