"""dsprof's engine at a ZeRO stage, or with the layers split between the stages of a pipeline."""

import torch.nn.functional as F
from common import Layer, Log, arguments, finish, mlp, start
from torch import randn
from torch.utils.data import TensorDataset

from dsprof import engine as deepspeed


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1, help="or micro-batches of a pipeline")
    parser.add_argument("--pipeline", type=int, default=1, metavar="STAGES")
    parser.add_argument("--slow-stage", type=int)
    parser.add_argument("--slow-rank", type=int, help="without a pipeline")
    parser.add_argument("--slow-by", type=float, default=2.2)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    args = parser.parse_args()
    rank, ranks = start(args.seed)
    log = Log(args)

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": args.accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": args.zero_stage},
    }
    x = randn(4 * ranks * args.accumulate * args.steps, 32)
    samples = TensorDataset(x, x.flip(1))
    if args.pipeline > 1:
        slow_by = [args.slow_by if stage == args.slow_stage else 1.0 for stage in range(args.pipeline)]
        model = deepspeed.PipelineModule(
            [Layer(32, args.forward_ms * slow_by[stage] / 2) for stage in range(args.pipeline) for _ in range(2)],
            args.pipeline,
            loss_fn=F.mse_loss,
            partition_method="uniform",
        )
    else:
        model = mlp(32, 4, args.forward_ms * (args.slow_by if rank == args.slow_rank else 1.0))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=samples, config=config
    )
    batches = iter(loader)
    for _ in range(args.steps):
        if args.pipeline > 1:
            log.step(engine.train_batch(batches).item())
            continue
        for _ in range(args.accumulate):
            inputs, targets = next(batches)
            loss = F.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
