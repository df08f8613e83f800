"""dsprof's training engine: ZeRO, pipelines and tensor parallelism with DeepSpeed's configuration and API.

    engine, optimizer, dataloader, lr_scheduler = dsprof.engine.initialize(model=model, config="ds.json", ...)

Names are loaded when they are used: importing `dsprof.engine.config` or `dsprof.engine.hooks` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpointing, pipe, tensor, zero
    from .arguments import add_config_arguments
    from .config import Config, ConfigError
    from .engine import Engine
    from .pipe.engine import PipelineEngine
    from .pipe.layers import LayerSpec, TiedLayerSpec
    from .pipe.module import PipelineModule
    from .setup import init_distributed, initialize

_HOME = {
    "initialize": "setup",
    "init_distributed": "setup",
    "add_config_arguments": "arguments",
    "Engine": "engine",
    "Config": "config",
    "ConfigError": "config",
    "PipelineModule": "pipe.module",
    "PipelineEngine": "pipe.engine",
    "LayerSpec": "pipe.layers",
    "TiedLayerSpec": "pipe.layers",
}
_SUBMODULES = ("checkpointing", "pipe", "tensor", "zero")

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "LayerSpec",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "pipe",
    "tensor",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in _SUBMODULES:
        found = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # a submodule of the same name must not come back instead
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
