"""dsprof's training engine: ZeRO, pipelines and tensor parallelism with DeepSpeed's configuration and API.

    engine, optimizer, dataloader, lr_scheduler = dsprof.engine.initialize(model=model, config="ds.json", ...)

Names are loaded when they are used: importing `dsprof.engine.config` or `dsprof.engine.hooks` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import activation_checkpoint as checkpointing
    from . import pipe, tensor, zero
    from .comm.launch import init_distributed
    from .config import Config, ConfigError
    from .pipe.layers import LayerSpec, TiedLayerSpec
    from .pipe.module import PipelineModule
    from .setup.initialize import add_config_arguments, initialize
    from .train.engine import Engine
    from .train.pipeline_engine import PipelineEngine

_HOME = {
    "initialize": "setup.initialize",
    "init_distributed": "comm.launch",
    "add_config_arguments": "setup.initialize",
    "Engine": "train.engine",
    "Config": "config",
    "ConfigError": "config",
    "PipelineModule": "pipe.module",
    "PipelineEngine": "train.pipeline_engine",
    "LayerSpec": "pipe.layers",
    "TiedLayerSpec": "pipe.layers",
}
_SUBMODULES = {"checkpointing": "activation_checkpoint", "pipe": "pipe", "tensor": "tensor", "zero": "zero"}

__all__ = [
    "Config", "ConfigError", "Engine", "LayerSpec", "PipelineEngine", "PipelineModule", "TiedLayerSpec",
    "add_config_arguments", "checkpointing", "init_distributed", "initialize", "pipe", "tensor", "zero",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in _SUBMODULES:
        found = importlib.import_module(f".{_SUBMODULES[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # a submodule of the same name must not come back instead
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
