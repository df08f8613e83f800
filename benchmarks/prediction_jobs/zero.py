"""dsprof's engine at a ZeRO stage: a slow rank, or a slow loader."""

import torch.nn.functional as F
from common import Log, Samples, Slowed, arguments, layers, start
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dsprof import engine as deepspeed


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    Slowed.add_arguments(parser)
    Samples.add_arguments(parser)
    args = parser.parse_args()
    rank, ranks = start()
    log = Log(args.log)

    samples = Samples(args.batch_size * ranks * args.steps, args.width, args.read_ms, args.decode_ms)
    loader = DataLoader(
        samples,
        batch_size=args.batch_size,
        sampler=DistributedSampler(samples),
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(*layers(args.width, args.layers, args.forward_ms))
    slowed = Slowed(model, args, rank)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": args.zero_stage},
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=loader, config=config
    )
    for number, (inputs, targets) in enumerate(loader):
        slowed.step(number)
        loss = F.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        log.step()
    log.finish()


if __name__ == "__main__":
    main()
