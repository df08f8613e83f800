"""ZeRO of DeepSpeed or of dsprof's engine, as a JSON configuration says: many small layers that sleep or compute."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Log, add_link, arguments, layers, slow_link, start
from torch import nn


def parse():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--own", action="store_true", help="dsprof's engine, not DeepSpeed")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--link", type=float, help="bytes a second that dsprof's engine moves at most, as if by a wire")
    add_link(parser)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards for each step of the optimizer")
    parser.add_argument("--deepspeed_config", required=True, help="the JSON file")
    return parser.parse_args()


def main():
    args = parse()
    rank, _ = start()
    if args.own:
        from dsprof import engine as deepspeed
    else:
        import deepspeed
    log = Log(args.log)
    model = nn.Sequential(*layers(args.width, args.layers, args.forward_ms))
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(deepspeed_config=args.deepspeed_config, local_rank=rank),
        model=model,
        model_parameters=model.parameters(),
        **({"link": args.link} if args.own and args.link else {}),
    )
    batches = torch.Generator().manual_seed(rank)
    for number in range(args.steps):
        for _ in range(args.accumulate):
            inputs = torch.randn(8, args.width, generator=batches)
            loss = F.mse_loss(engine(inputs), inputs.flip(1))
            engine.backward(loss)
            engine.step()
        if number == 1:
            slow_link(args)
        log.step()
    dist.barrier()
    log.finish()


if __name__ == "__main__":
    main()
