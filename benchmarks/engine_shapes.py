"""What benchmarks/engine.py trains: models whose gradients are a few large tensors, many small ones, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from block import Block
from torch import Generator, Tensor, nn

VOCABULARY, LENGTH, HEADS = 2048, 64, 4


class GPT(nn.Module):
    """A language model; its input and output layers have `rows` and VOCABULARY tokens."""

    def __init__(self, width: int = 256, layers: int = 10, rows: int = 4 * VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.positions = nn.Parameter(torch.zeros(1, LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of ids [batch, LENGTH]."""
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return next_token(self.head(self.norm(x)), ids)


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean loss of logits [batch, length, VOCABULARY]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % VOCABULARY)


class Residual(nn.Module):
    """x [batch, inner, height, width] -> [batch, outer, ...]: two convolutions with batch norm, and a way past them."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        stride = 1 if inner == outer else 2
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.past = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.past(x) + self.norm2(self.second(y)))


class ConvNet(nn.Module):
    """A residual network of 18 blocks for images of 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32] * 6 + [64] * 6 + [128] * 6
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList(Residual(a, b) for a, b in zip([32, *widths], widths, strict=False))
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The mean loss of images [batch, 3, 16, 16]; an image's class is how bright its first pixel is."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), (10 * images[:, 0, 0, 0]).long())


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, what it reads, and on how many ranks. The model has `blocks`, which FSDP2 shards one by one."""

    about: str
    model: Callable[[], nn.Module]
    batch: int
    """Samples a rank and step."""
    sample: Callable[[int, Generator], Tensor]
    """So many samples."""
    ranks: int = 2


def tokens(samples: int, generator: Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)


def images(samples: int, generator: Generator) -> Tensor:
    return torch.rand(samples, 3, 16, 16, generator=generator)


SHAPES = {
    "gpt": Shape("a GPT of 10 layers of width 256", GPT, 4, tokens),
    "small-parameters": Shape("a GPT of 48 layers of width 96", lambda: GPT(96, 48), 2, tokens),
    "convolutions": Shape("a residual network with batch norm", ConvNet, 8, images),
    "large-embedding": Shape("an embedding of 20 million", lambda: GPT(128, 6, 20_000_000 // 128), 4, tokens),
    "four-ranks": Shape("a GPT of 10 layers of width 256", GPT, 4, tokens, ranks=4),
}
"""The first is what the others are held against."""
