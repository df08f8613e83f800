"""The model of the random tester of scripts: its sums are exact in every precision and order.

Activations are halves from -1 to 1, and gradients that go back are -1, 0 or 1; so the gradients of weights are small
multiples of a half, whose sums over samples, micro-batches and ranks have at most eight bits. With a learning rate and
a momentum that are powers of two, a training in bf16 over any number of ranks is that of one process bit for bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS: Final = 5
WIDTH: Final = 8
PATH: Final = ("embed", "first", "second", "conv", "late", "frozen", "head")
"""The layers in the order in which they are called, but `side`."""


class TroubleError(Exception):
    """What the script's own code raises in the middle of a forward, a backward or an optimizer."""


TROUBLE: Final[dict[str, str]] = {}
"""Where it is raised next: `forward`, `backward` or `loss` -> a layer's name. Of this process."""


def check_trouble(when: str, layer: str) -> None:
    """Raise TroubleError if that is where it was to be."""
    if TROUBLE.get(when) == layer:
        raise TroubleError(f"{when} of {layer}")


class Coarse(torch.autograd.Function):
    """Rounds activations, and the gradients that go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: str) -> Tensor:
        ctx.layer = layer
        return (x * 2).round().clamp(-2, 2) / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        check_trouble("backward", ctx.layer)
        (grad,) = grads
        return grad.round().clamp(-1, 1), None


class Layer(nn.Module):
    """What its name says it is: [samples, width] -> [samples, width], of the first one token ids [samples]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.named = name
        self.inner: nn.Module
        if name == "embed":
            self.inner = nn.Embedding(WORDS, WIDTH)
            self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        elif name == "conv":
            self.inner = nn.Conv2d(2, 2, 3, padding=1)
        elif name == "head":
            self.inner = nn.Linear(WIDTH, WORDS, bias=False)
        else:
            # Sizes that two ranks do not divide.
            narrow = WIDTH - 1
            widths = {"first": (WIDTH, narrow), "second": (narrow, WIDTH)}.get(name, (WIDTH, WIDTH))
            self.inner = nn.Linear(*widths)

    def forward(self, x: Tensor) -> Tensor:
        check_trouble("forward", self.named)
        if self.named == "embed":
            if self.training:
                self.forwards += 1
            x = self.inner(x) if self.training else -self.inner(x)
        elif self.named == "conv":
            x = self.inner(x.view(-1, 2, 2, 2)).reshape(-1, WIDTH)
        elif self.named == "second":
            x = F.linear(x, self.inner.weight, self.inner.bias)  # not by its call
        else:
            x = self.inner(x)
        coarse: Tensor = Coarse.apply(x, self.named)
        return coarse


class Net(nn.Module):
    """The layers one after the other; `late` is not given to the optimizer at first, `frozen` does not train."""

    def __init__(self, *, tied: bool, side: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in (*PATH, "side") if side else PATH:
            self.add_module(name, Layer(name))
        if tied:
            self.head.inner.weight = self.embed.inner.weight
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-4, 5, param.shape, generator=generator) / 4)
        self.frozen.requires_grad_(False)
        self.times = 1
        """What losses are multiplied by: the micro-batches of a step, by whose number the engine divides."""

    def forward(self, ids: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        """The loss; `side` has one layer more called."""
        x: Tensor = ids
        for name in PATH:
            x = self.get_submodule(name)(x)
            if name == "conv" and side:
                x = self.side(x)
        return self.times * loss_of(x, targets)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of outputs and targets [samples, WORDS]: its gradient is the targets, -1, 0 and 1."""
    check_trouble("loss", "loss")
    return (outputs.float() * targets).sum()


def batch(number: int, replica: int, samples: int) -> tuple[Tensor, Tensor]:
    """Token ids [samples] and targets [samples, WORDS] of micro-batch `number`."""
    generator = torch.Generator().manual_seed(1000 * number + replica)
    ids = torch.randint(0, WORDS, (samples,), generator=generator)
    return ids, torch.randint(-1, 2, (samples, WORDS), generator=generator).float()
