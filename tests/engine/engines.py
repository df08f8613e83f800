"""Engines of linear layers, for tests of what an engine does on little data."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsprof.engine import Engine, PipelineEngine, initialize
from dsprof.engine.checkpoint import CheckpointError
from dsprof.engine.comm.comm import Comm
from dsprof.engine.config import ZeroConfig
from dsprof.engine.zero.fetch import Fetcher
from dsprof.engine.zero.gather import Gatherer
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.storage import LiveParams

WIDTH = 8
LAYER = WIDTH * WIDTH
"""Elements of each layer of `Layers`."""


class Layers(nn.Sequential):
    """Linear layers of LAYER elements each, and one number as output."""

    def __init__(self, depth: int = 4) -> None:
        torch.manual_seed(3)
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.square().mean()


def configuration(stage: int = 0, *, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """SGD without clipping; in stage 3 all parameters are sharded."""
    threshold = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **threshold, **(zero or {})},
        **more,
    }


@contextlib.contextmanager
def engine_for(model: nn.Module, config: dict[str, Any], *, link: float | None = None, **more: Any) -> Iterator[Engine]:
    """An engine, closed at the end. `link`: its lanes then take at least their bytes over `link` bytes/s."""
    engine, *_ = initialize(model=model, config=config, link=link, **{"model_parameters": model.parameters(), **more})
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Engine, steps: int, make_input: Callable[[], Tensor] | None = None) -> None:
    """Take `steps` steps."""
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, WIDTH) if make_input is None else make_input()))
        engine.step()


def save_on_small_disk(engine: Engine | PipelineEngine, small: bool, folder: Path) -> str:
    """Save a checkpoint, and another one while this rank, if its disk is `small`, cannot write a file of more than a
    few thousand bytes: the error that gave."""
    engine.save_checkpoint(folder, "good")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if small:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        engine.save_checkpoint(folder, "bad")
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


# --- what ZeRO has of parameters

ALONE = Gatherer(Comm(None, None), ZeroConfig())
"""Gathers nothing: for parameters of a test that has no engine."""


def stored_bytes(param: ShardedParam) -> int:
    """Bytes of the storage that a parameter has when it is whole, at this moment."""
    return param.storage.whole.untyped_storage().size()


class PeakLive(LiveParams[ShardedParam]):
    """Remembers the most elements that were live."""

    peak: int

    def expect(self, param: ShardedParam) -> None:
        super().expect(param)
        self.peak = max(self.peak, self.live)


def watch_peak(fetcher: Fetcher | None) -> PeakLive:
    """Have the most elements that are live from now on remembered."""
    assert fetcher is not None
    watched: Any = fetcher.live_params
    watched.__class__, watched.peak = PeakLive, watched.live
    return watched  # type: ignore[no-any-return]
