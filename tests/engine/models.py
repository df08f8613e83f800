"""Small models with what makes sharding hard, and the single-process training they are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

VOCABULARY = 31


class Block(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result
        return self.inner(x)


class Small(nn.Module):
    """A language model with every oddity: tied, unused, frozen and 0-d parameters, and one used outside its module."""

    def __init__(self, width: int = 16, depth: int = 3, *, recompute: bool = False, odd: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.odd = odd
        if odd:
            self.head.weight = self.embedding.weight  # tied
            self.gain = nn.Parameter(torch.tensor(1.5))  # 0-d, owned by the root
            self.unused = nn.Linear(width, 5)
            self.frozen = nn.Linear(width, width)
            self.frozen.requires_grad_(False)
            self.mixer = nn.Linear(width, width)  # never called: its weight is used from outside

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if self.odd:
            x = self.frozen(x) + F.linear(x, self.mixer.weight, self.mixer.bias) * self.gain
        logits: Tensor = self.head(x)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def build(dtype: torch.dtype = torch.float32, **kind: object) -> Small:
    """The same weights in every process."""
    torch.manual_seed(1)
    return Small(**kind).to(dtype)  # type: ignore[arg-type]


def batches(steps: int, accumulate: int, ranks: int) -> Tensor:
    """Token ids [steps, accumulate, ranks, batch, length]."""
    return torch.randint(0, VOCABULARY, (steps, accumulate, ranks, 2, 7), generator=torch.Generator().manual_seed(7))


def reference(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    data: Tensor,
    clip: float = 0.0,
    scale: float = 1.0,
) -> list[float]:
    """Train `model` in one process as all ranks together would, every loss times `scale`; the loss of each step."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(params)
    losses = []
    for step in data:
        optimizer.zero_grad()
        total = 0.0
        for microbatch in step:
            for batch in microbatch:
                loss = scale * model(batch) / (step.shape[0] * step.shape[1])
                loss.backward()
                total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        losses.append(total)
    return losses


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index
