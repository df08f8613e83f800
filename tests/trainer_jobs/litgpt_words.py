"""litgpt's data, as `--data litgpt_words.Words`: random words, from which its loaders take whole samples."""

from __future__ import annotations

import time

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, length: int, seconds: float) -> None:
        self.words = torch.randint(100, (count, length + 1), generator=torch.Generator().manual_seed(1))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.words[index]


class Words(DataModule):
    """`seconds` is what it takes to read one sample."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.batch_size, self.length = 1, 1

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size, self.length = batch_size, max_seq_length or 32

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(1024, self.length, self.seconds), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(16, self.length, 0.0), self.batch_size)
