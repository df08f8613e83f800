"""One process in the manner of torch's MNIST example: a loader with workers to train, another to test."""

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp, work
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, count, read_ms):
        self.x = torch.randn(count, 32)
        self.read_ms = read_ms

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        work(self.read_ms, "data")
        return self.x[index], self.x[index].flip(0)


def train(model, train_loader, optimizer, log):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        log.step(loss.item())


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        for inputs, targets in test_loader:
            F.mse_loss(model(inputs), targets).item()


def main():
    parser = arguments(__doc__, steps=70)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--test-workers", type=int, default=0)
    parser.add_argument("--read-ms", type=float, default=10.0, help="of one sample to train on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = Log(args)

    digits = Digits(8 * (args.steps // args.epochs), args.read_ms)
    test_loader = DataLoader(Digits(32, 0.5), batch_size=16, num_workers=args.test_workers)
    train_loader = DataLoader(digits, batch_size=8, shuffle=True, num_workers=args.workers)

    model = mlp(32, 3, args.forward_ms)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(args.epochs):
        train(model, train_loader, optimizer, log)
        test(model, test_loader)
    finish(log)


if __name__ == "__main__":
    main()
