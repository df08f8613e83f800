"""Models that tensor parallelism has to shard, and the comparison of a sharded model with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dsprof.engine.comm.comm import Comm, open_comm
from dsprof.engine.comm.lane import Inline
from dsprof.engine.hooks import Hooks
from dsprof.engine.tensor import TensorPlan, parallelize, partial_parameters, shard_of

VOCABULARY = 30


def tensor_comm(size: int | None = None) -> Comm:
    """All ranks of the job, or a group of `size` neighbours, working on the same data."""
    world = dist.get_world_size()
    size = size or world
    return open_comm([range(first, first + size) for first in range(0, world, size)], lambda: Inline(Hooks()))


class FusedAttention(nn.Module):
    """Queries, keys and values in one projection; sizes from the input, as in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class GroupedAttention(nn.Module):
    """Grouped queries with odd names; the layers are registered in an order that says nothing."""

    def __init__(self, width: int, heads: int, groups: int, head: int, norms: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, head
        self.collect = nn.Linear(heads * head, width)
        self.values = nn.Linear(width, groups * head)
        self.lookups = nn.Linear(width, groups * head)
        self.asks = nn.Linear(width, heads * head, bias=False)
        self.norm = nn.LayerNorm(head) if norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.asks(x).unflatten(-1, (self.heads, self.head))).transpose(1, 2)
        k = self.norm(self.lookups(x).unflatten(-1, (self.groups, self.head))).transpose(1, 2)
        v = self.values(x).unflatten(-1, (self.groups, self.head)).transpose(1, 2)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.collect(y.transpose(1, 2).flatten(2))
        return out


class InterleavedAttention(nn.Module):
    """Query, key and value of each head side by side, as in GPT-NeoX."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * self.head)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    """Gate and input in one projection; dropout inside."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        out: Tensor = self.down(self.dropout(F.silu(gate) * up))
        return out


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), attention
        self.between, self.mlp = nn.LayerNorm(width), mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        y: Tensor = x + self.dropout(self.mlp(self.between(x)))
        return y


class Language(nn.Module):
    """Ids [b, t] -> logits [b, t, VOCABULARY]; the head is tied to the embedding."""

    def __init__(self, blocks: list[nn.Module], width: int, tied: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


WIDTH = 16


def language(kind: str = "fused", dropout: float = 0.0) -> Language:
    """Two blocks of width 16, the same in every process; of `fused` four heads, of `grouped` eight in two groups."""
    torch.manual_seed(5)

    def attention() -> nn.Module:
        if kind == "fused":
            return FusedAttention(WIDTH, 4, dropout)
        if kind == "interleaved":
            return InterleavedAttention(WIDTH, 4)
        return GroupedAttention(WIDTH, 8, 2, 4, norms=kind == "normed")

    def mlp() -> nn.Module:
        if kind == "grouped":
            return Gated(WIDTH, 24, dropout)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH))

    return Language([Block(WIDTH, attention(), mlp(), dropout) for _ in range(2)], WIDTH, tied=kind != "grouped")


def token_ids(rows: int = VOCABULARY) -> Tensor:
    """[2, 8]"""
    return torch.randint(0, rows, (2, 8), generator=torch.Generator().manual_seed(9))


def compare(whole: nn.Module, comm: Comm, *args: Any, tolerance: float = 1e-10, **options: Any) -> TensorPlan:
    """Shard a copy of `whole`, which gets `args`, and hold outputs and gradients against it."""
    whole = whole.double()
    whole.zero_grad()
    cut = copy.deepcopy(whole)
    plan = parallelize(cut, comm, **options)
    expected, found = logits_of(whole(*args)), logits_of(cut(*args))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    compare_gradients(whole, cut, comm, tolerance)
    return plan


def compare_gradients(whole: nn.Module, cut: nn.Module, comm: Comm, tolerance: float = 1e-10) -> None:
    """Each parameter's gradient is this rank's part of the whole one, once the partial ones have been summed."""
    partial = {id(param) for param in partial_parameters(cut)}
    params = dict(cut.named_parameters())
    assert params.keys() == dict(whole.named_parameters()).keys()
    for name, param in whole.named_parameters():
        mine = params[name]
        if param.grad is None:
            assert mine.grad is None, name
            continue
        layout, expected = shard_of(mine), param.grad
        if layout is not None:
            assert torch.equal(mine.detach(), layout.take(param.detach())), name
            expected = layout.take(expected)
        assert mine.grad is not None, name
        if id(mine) in partial:
            comm.all_reduce(mine.grad, "tensor-parallel").wait()
        torch.testing.assert_close(
            mine.grad, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def logits_of(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def error_of(function: Callable[[], Any]) -> str:
    """The message of the ValueError that `function` raises."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""
