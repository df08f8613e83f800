"""Hugging Face's Trainer on a tiny language model: two micro-batches a step, clipping, and an evaluation half-way."""

from __future__ import annotations

from typing import Any

import torch
from steps import BATCH, STEPS, write_losses
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WORDS, LENGTH = 32, 16


class Sentences(Dataset):
    def __init__(self, count: int) -> None:
        self.words = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Told(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        self.losses += [value for name, value in (logs or {}).items() if name in ("loss", "eval_loss", "grad_norm")]


torch.manual_seed(0)
told = Told()
config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Sentences(2 * 2 * BATCH * STEPS),
    eval_dataset=Sentences(4 * BATCH),
    callbacks=[told],
)
trainer.train()
write_losses(told.losses)
