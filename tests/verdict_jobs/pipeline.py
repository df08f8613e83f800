"""A stage a rank under torch.distributed.pipelining; one stage may take longer than the others, or the link between two
of them be slow."""

import torch
import torch.nn.functional as F
from common import HURRY, Log, arguments, finish, mlp, start
from paced_link import pace
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def main():
    parser = arguments(__doc__, steps=40)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--forward-ms", type=float, default=2.0, help="of one micro-batch in one stage")
    parser.add_argument("--slow-stage", type=int)
    parser.add_argument("--slow-by", type=float, default=2.2)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch: 128 bytes each are sent")
    parser.add_argument("--slow-edge", type=int, help="stage whose activations go over a slow link to the next one")
    parser.add_argument("--link", type=float, default=10.0, help="what that moves, MB/s")
    args = parser.parse_args()
    rank, stages = start(args.seed)
    log = Log(args)

    forward_ms = args.forward_ms * (args.slow_by if rank == args.slow_stage else 1.0)
    stage = PipelineStage(mlp(32, 2, forward_ms), rank, stages, torch.device("cpu"))
    schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)

    batches = torch.Generator().manual_seed(args.seed)
    for number in range(args.steps):
        if number == 1 and args.slow_edge is not None and not HURRY:
            pace(args.slow_edge, args.slow_edge + 1, int(args.link * 1e6))
        inputs = torch.randn(args.rows * args.micro_batches, 32, generator=batches)
        losses = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == stages - 1:
            schedule.step(target=inputs.flip(1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        log.step(torch.stack(losses).mean().item() if losses else 0.0)
    finish(log)


if __name__ == "__main__":
    main()
