"""A pipeline with what makes it hard, and the single-process training that it is held against."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.comm.comm import Comm
from dsprof.engine.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsprof.engine.tensor import shard_of

VOCABULARY: Final = 12
WIDTH: Final = 16
BLOCKS: Final = 7
MICROBATCHES: Final = 4
SAMPLES: Final = 2
STEPS: Final = 2


class Attention(nn.Module):
    """Grouped queries: eight heads, two of keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.size = width // 8
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, width // 4) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Block(nn.Module):
    """A transformer's, with attention or without."""

    def __init__(self, width: int, attention: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width) if attention else None
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.attention is not None:
            x = x + self.attention(normed)
        return x + self.down(torch.relu(self.up(normed)))


def project(embedding: nn.Module, x: Tensor) -> Tensor:
    """The tied output layer."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return x @ weight.t()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def layers() -> list[Any]:
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Block, WIDTH, attention=number % 2 == 0) for number in range(BLOCKS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        torch.tanh,
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=project),
    ]


def module(stages: int | None = None, **more: Any) -> PipelineModule:
    """The pipeline; its weights do not depend on the stages."""
    return PipelineModule(layers(), stages, loss_fn=loss_of, seed_layers=True, **more)


def batches(replicas: int, microbatches: int = MICROBATCHES, steps: int = STEPS) -> Tensor:
    """Token ids [step, micro-batch, replica, samples, length]; what comes next is predicted."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (steps, microbatches, replicas, SAMPLES, 6), generator=generator)


def examples(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(inputs, labels) of each micro-batch [micro-batch, samples, length], every other one shorter by two."""
    return [(x[:, : 4 + number % 2], x[:, 1 : 5 + number % 2]) for number, x in enumerate(ids)]


@functools.cache
def reference(replicas: int, microbatches: int = MICROBATCHES, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights after training in one process, in float64."""
    whole = module()
    whole.arrange(1, 0)
    whole.double()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for step in batches(replicas, microbatches, steps):
        optimizer.zero_grad()
        for replica in range(replicas):
            for inputs, labels in examples(step[:, replica]):
                (loss_of(whole(inputs), labels) / (replicas * microbatches)).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach().clone() for name, param in whole.named_parameters()}


def configuration(**more: Any) -> dict[str, Any]:
    """AdamW and clipping as the reference has them."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }


def trained(engine: Any, steps: int = STEPS, microbatches: int = MICROBATCHES) -> dict[str, Tensor]:
    """Train, and give the whole weights that this rank has."""
    mesh = engine.parallel.mesh
    for step in batches(mesh.dp, microbatches, steps):
        engine.train_batch(iter(examples(step[:, mesh.dp_rank])))
    return weights(engine)


def weights(engine: Any) -> dict[str, Tensor]:
    """This rank's parameters, brought together where they are sharded."""
    engine.zero.gatherer.gather([param for param in engine.zero.params if not param.resident], 10**9)
    return {param.name: whole(param.param, engine.parallel.tensor) for param in engine.zero.params}


def whole(param: nn.Parameter, comm: Comm) -> Tensor:
    """A parameter with the parts that the other tensor-parallel ranks have."""
    cut = shard_of(param)
    if cut is None:
        return param.detach().clone()
    parts: list[Any] = [None] * comm.size
    dist.all_gather_object(parts, param.detach(), group=comm.group)
    return cut.join(parts)


def start(model: nn.Module, config: dict[str, Any]) -> Any:
    """An engine."""
    engine, *_ = ds.initialize(model=model, config=config)
    return engine
