"""transformers' Trainer."""

import tempfile

import torch
import torch.nn.functional as F
from common import Log, arguments, finish, mlp
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Samples(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"inputs": self.x[index], "labels": self.x[index].flip(0)}


class Model(nn.Module):
    def __init__(self, forward_ms):
        super().__init__()
        self.net = mlp(32, 4, forward_ms)

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}


class Told(TrainerCallback):
    def __init__(self, log):
        self.log = log

    def on_step_end(self, args, state, control, **kwargs):
        self.log.step(0.0)


def main():
    parser = arguments(__doc__, steps=60)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = Log(args)
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_trainer = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=args.accumulate,
            report_to=[],
            save_strategy="no",
            logging_steps=20,
            use_cpu=True,
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = Trainer(
            model=Model(args.forward_ms),
            args=arguments_of_trainer,
            train_dataset=Samples(8 * 2 * args.steps * args.accumulate),
            callbacks=[Told(log)],
        )
        done = trainer.train()
    log.losses[-1] = done.training_loss
    finish(log)


if __name__ == "__main__":
    main()
