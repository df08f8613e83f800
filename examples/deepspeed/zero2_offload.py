"""A small convolutional network with ZeRO-2 and the optimizer's states in host memory, after DeepSpeed's tutorials.

    deepspeed --num_gpus 2 zero2_offload.py --deepspeed_config zero2_offload.json
    dsprof run --engine dsprof --num_gpus 2 zero2_offload.py --deepspeed_config zero2_offload.json

It knows nothing of dsprof.
"""

import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator


class Shapes(torch.utils.data.Dataset):
    """Noisy pictures [3, 16, 16] of ten patterns: something to learn that need not be downloaded."""

    def __init__(self, length=2048):
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 3, 16, 16, generator=generator)
        self.labels = torch.randint(10, (length,), generator=generator)
        self.pictures = patterns[self.labels] + torch.randn(length, 3, 16, 16, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def get_args():
    parser = argparse.ArgumentParser(description="ZeRO-2 with an offloaded optimizer")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=16, help="print the loss every so many mini-batches")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _optimizer, trainloader, _scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Shapes()
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)

            model_engine.backward(loss)
            model_engine.step()

            running_loss += loss.item()
            if model_engine.global_rank == 0 and i % args.log_interval == args.log_interval - 1:
                lr = model_engine.get_lr()[0]
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f} lr: {lr:.2e}")
                running_loss = 0.0

    if model_engine.global_rank == 0:
        print("Finished Training")


if __name__ == "__main__":
    main()
