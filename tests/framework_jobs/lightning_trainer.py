"""Lightning's Trainer with its DDP strategy on two processes: those of its launcher, or those that it starts itself."""

from __future__ import annotations

import sys

import lightning
import torch
from steps import BATCH, STEPS, make_batches, make_model, write_losses
from torch.utils.data import DataLoader, TensorDataset

RANKS = 2


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.losses: list[float] = []
        self.fails = sys.argv[1:] == ["fails"]

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(batch[0]).pow(2).mean()
        self.losses.append(loss.item())
        if self.fails and self.global_rank == 1 and len(self.losses) == STEPS:
            raise RuntimeError("this rank fails")
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("validation", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def main() -> None:
    data = TensorDataset(torch.cat(make_batches(2 * RANKS * STEPS)))
    held_out = TensorDataset(torch.cat(make_batches(2 * RANKS)))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_steps=STEPS, accumulate_grad_batches=2,
        gradient_clip_val=1.0, val_check_interval=STEPS, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=BATCH), DataLoader(held_out, batch_size=BATCH))
    write_losses(module.losses, trainer.global_rank)


if __name__ == "__main__":
    main()
