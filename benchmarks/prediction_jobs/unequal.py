"""The engine on ranks that sleep for each of their samples; `--slow-rank` sleeps twice as long."""

import argparse

import torch
from common import Log, Work, arguments, start
from torch import nn
from torch.utils.data import TensorDataset

from dsprof import engine as deepspeed

WIDTH = 32


def parse():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--sample-ms", type=float, default=36.0, help="forward and backward of one sample")
    parser.add_argument("--slow-rank", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--deepspeed_config", required=True, help="the JSON file")
    return parser.parse_args()


class Slow(nn.Linear):
    """Takes `sample_ms` for each sample, a third of it in forward."""

    def __init__(self, sample_ms: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.sample_ms = sample_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ms = self.sample_ms * len(x)
        return Work.apply(super().forward(x), ms / 3, 2 * ms / 3)


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x), y)


def main():
    args = parse()
    rank, _ = start()
    each = args.sample_ms / args.layers * (2 if rank == args.slow_rank else 1)
    log = Log(args.log)
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(deepspeed_config=args.deepspeed_config, local_rank=rank),
        model=Model(*(Slow(each) for _ in range(args.layers))),
        training_data=TensorDataset(x, x.flip(1)),
    )
    for _ in range(args.steps):
        engine.train_batch()
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
