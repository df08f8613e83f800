"""A LightningModule and its Trainer."""

import lightning
import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, forward_ms, log):
        super().__init__()
        self.net = mlp(32, 4, forward_ms)
        self.results = [log]  # in a list: Lightning looks into attributes

    def training_step(self, batch):
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.results[0].step(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = Log(args)
    x = torch.randn(8 * args.ranks * args.steps, 32)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=8)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp" if args.ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(args.forward_ms, log), loader)
    finish(log)


if __name__ == "__main__":
    main()
