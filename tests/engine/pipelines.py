"""A pipeline with what makes it hard, and the single-process training that it is held against."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY: Final = 12
WIDTH: Final = 8
BLOCKS: Final = 7
MICROBATCHES: Final = 4
SAMPLES: Final = 2
STEPS: Final = 2


class Block(nn.Module):
    """A residual block with a norm, two linear layers, and a tensor that is passed by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


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
        *(LayerSpec(Block, WIDTH) for _ in range(BLOCKS)),
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
    """This rank's parameters, brought together where they are in pieces."""
    engine.zero.gatherer.bring([param for param in engine.zero.params if not param.resident], 10**9)
    return {param.name: param.param.detach().clone() for param in engine.zero.params}


def start(model: nn.Module, config: dict[str, Any]) -> Any:
    """An engine."""
    engine, *_ = ds.initialize(model=model, config=config)
    return engine
