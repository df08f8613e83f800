"""transformers' Trainer over samples that take their time to read; rank 0 may hold many objects."""

import argparse
import gc
import tempfile

import torch
import torch.nn.functional as F
from common import Samples, layers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Named(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, labels = self.samples[index]
        return {"inputs": inputs, "labels": labels}


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.net = nn.Sequential(*layers(options.width, options.layers, options.forward_ms))

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}


class Collect(TrainerCallback):
    """Collect garbage after every so many steps."""

    def __init__(self, every):
        self.every = every

    def on_step_end(self, args, state, control, **more):
        if self.every and state.global_step % self.every == 0:
            gc.collect()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--read-ms", type=float, default=0.0, help="asleep, of one sample")
    parser.add_argument("--heap", type=int, default=0, help="objects that are held, and walked for garbage")
    parser.add_argument("--collect-every", type=int, default=1, metavar="STEPS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    index = [{"window": number, "shard": [number]} for number in range(options.heap // 2)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=Model(options),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch_size,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Named(Samples(options.batch_size * 2 * options.steps, options.width, options.read_ms)),
            callbacks=[Collect(options.collect_every if index else 0)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
