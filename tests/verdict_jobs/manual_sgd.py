"""A loop without torch.optim: the weights are moved by hand."""

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.ddp:
        start(args.seed)
    log = Log(args)

    model = mlp(32, 3, args.forward_ms)
    if args.ddp:
        model = DistributedDataParallel(model)
    batches = torch.Generator().manual_seed(args.seed + log.rank)
    for _ in range(args.steps):
        inputs = torch.randn(8, 32, generator=batches)
        loss = F.mse_loss(model(inputs), inputs.flip(1))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
