"""Lightning's Trainer over samples that take their time to read."""

import argparse

import lightning
import torch
import torch.nn.functional as F
from common import Samples, layers
from torch import nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.net = nn.Sequential(*layers(options.width, options.layers, options.forward_ms))

    def training_step(self, batch):
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--read-ms", type=float, default=0.0, help="asleep, of one sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = Samples(options.batch_size * options.steps, options.width, options.read_ms)
    trainer.fit(Module(options), DataLoader(samples, batch_size=options.batch_size))


if __name__ == "__main__":
    main()
