"""A stage a rank, under torch.distributed.pipelining or dsprof's engine."""

import torch
import torch.nn.functional as F
from common import Log, arguments, layers, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

from dsprof import engine as deepspeed

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
WIDTH, SAMPLES = 32, 4


class OfSamples(nn.Sequential):
    """Layers that take their time for SAMPLES samples, and for others as much longer as there are more."""

    def forward(self, x):
        for layer in self:
            layer.times = len(x) / SAMPLES
        return super().forward(x)


def under_torch(args, rank, stages, log):
    stage = PipelineStage(
        OfSamples(*layers(WIDTH, args.layers, args.stage_ms[rank])), rank, stages, torch.device("cpu")
    )
    batch = args.batch or SAMPLES * args.micro_batches
    schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        inputs = torch.randn(batch, WIDTH, generator=batches)
        if rank == 0:
            schedule.step(inputs)
        elif rank == stages - 1:
            schedule.step(target=inputs.flip(1))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        log.step()


def under_engine(args, stages, log):
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = deepspeed.PipelineModule(
        [layer for ms in args.stage_ms for layer in layers(WIDTH, args.layers, ms)],
        stages,
        loss_fn=F.mse_loss,
        partition_method="uniform",
    )
    x = torch.randn(SAMPLES * args.micro_batches * args.steps, WIDTH)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=SAMPLES)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=loader, config=config
    )
    batches = iter(loader)
    for _ in range(args.steps):
        engine.train_batch(batches)
        log.step()


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--schedule", choices=[*SCHEDULES, "engine"], default="1F1B")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, help="samples of a step; default: four a micro-batch")
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--stage-ms", type=float, nargs="+", help="forward of four samples, of each stage")
    args = parser.parse_args()
    rank, stages = start()
    log = Log(args.log)
    if args.schedule == "engine":
        under_engine(args, stages, log)
    else:
        under_torch(args, rank, stages, log)
    log.finish()


if __name__ == "__main__":
    main()
