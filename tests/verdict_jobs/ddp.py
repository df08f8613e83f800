"""DistributedDataParallel, plain, or with one thing of its own a switch: see --help."""

import random

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start, work
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Samples(Dataset):
    def __init__(self, count, width, read_ms):
        self.x = torch.randn(count, width)
        self.read_ms = read_ms

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        work(self.read_ms, "data")
        return self.x[index], self.x[index].flip(0)


def parse():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batch-norm", action="store_true", help="layers have buffers, which DDP broadcasts")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile the model")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps a step")
    parser.add_argument("--two-optimizers", action="store_true", help="one for weights, one for biases")
    parser.add_argument("--lengths", type=float, default=0.0, metavar="SHARE", help="steps vary, on all ranks alike")
    parser.add_argument("--warm-up", type=int, default=0, metavar="STEPS", help="these take three times as long")
    parser.add_argument("--late-rank", type=int, help="its disk is slow")
    parser.add_argument("--late-ms", type=float, default=40.0, help="that it needs more for a batch")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=1.3)
    parser.add_argument("--stop-rank", type=int, help="it stands still, once")
    parser.add_argument("--stop-step", type=int, default=33)
    parser.add_argument("--stop-s", type=float, default=3.0)
    parser.add_argument("--stop-in", choices=["loop", "forward"], default="loop")
    return parser.parse_args()


def main():
    args = parse()
    rank, ranks = start(args.seed)
    log = Log(args)

    read_ms = args.late_ms / args.batch_size if rank == args.late_rank else 0.0
    samples = Samples(args.batch_size * ranks * args.steps * args.accumulate, args.width, read_ms)
    sampler = DistributedSampler(samples, seed=args.seed)
    batches = iter(DataLoader(samples, batch_size=args.batch_size, sampler=sampler))

    forward_ms = args.forward_ms * (args.slow_by if rank == args.slow_rank else 1.0)
    net = mlp(args.width, args.layers, forward_ms, args.batch_norm)
    if args.compile:
        net = torch.compile(net, backend=args.compile)
    model = DistributedDataParallel(net)
    if args.stop_in == "forward":
        net.register_forward_pre_hook(lambda *_: work(stop_ms[step], "stop"))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    if args.two_optimizers:
        parameters = list(model.parameters())
        optimizers = [
            torch.optim.AdamW([p for p in parameters if p.ndim > 1], lr=1e-3),
            torch.optim.SGD([p for p in parameters if p.ndim == 1], lr=1e-2),
        ]
    lengths = random.Random(args.seed)
    layers = [layer for layer in model.modules() if hasattr(layer, "forward_ms")]
    usual_ms = layers[0].forward_ms
    stop_ms = dict.fromkeys(range(args.steps), 0.0)
    if rank == args.stop_rank:
        stop_ms[args.stop_step] = 1e3 * args.stop_s
    for step in range(args.steps):
        factor = 1 + args.lengths * lengths.uniform(-1, 1)
        for layer in layers:
            layer.forward_ms = usual_ms * factor * (3 if step < args.warm_up else 1)
        if args.stop_in == "loop":
            work(stop_ms[step], "stop")
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro_step in range(args.accumulate):
            inputs, targets = next(batches)
            model.require_backward_grad_sync = micro_step == args.accumulate - 1
            loss = F.mse_loss(model(inputs), targets) / args.accumulate
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
