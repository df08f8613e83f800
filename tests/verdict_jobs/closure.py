"""Forward and backward run in the closure of `optimizer.step`: as LBFGS wants it, and as Lightning does it for Adam."""

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, start
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = arguments(__doc__, steps=45)
    parser.add_argument("--optimizer", choices=["LBFGS", "Adam"], default="LBFGS")
    parser.add_argument("--max-iter", type=int, default=4, help="of LBFGS")
    parser.add_argument("--forward-ms", type=float, default=6.0)
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.ddp:
        start(args.seed)
    log = Log(args)

    model = mlp(16, 3, args.forward_ms)
    if args.ddp:
        model = DistributedDataParallel(model)
    if args.optimizer == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=args.max_iter)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(args.seed + log.rank)
    for _ in range(args.steps):
        inputs = torch.randn(16, 16, generator=batches)

        def closure(inputs=inputs):
            loss = F.mse_loss(model(inputs), inputs.flip(1))
            optimizer.zero_grad()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        log.step(loss.item())
    finish(log)


if __name__ == "__main__":
    main()
