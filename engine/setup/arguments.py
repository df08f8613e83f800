"""What `initialize` is given: refused before anything is opened, where it cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..tensor.sharding import sharded_parameters


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The one of them that was passed. Raises ValueError for none, or several."""
    by_args = getattr(args, "deepspeed_config", None)
    given = [name for name, value in
             (("config", config), ("config_params", config_params), ("args.deepspeed_config", by_args))
             if value is not None]  # fmt: skip
    if not given:
        raise ValueError("initialize: no configuration; pass config= (a dict or the path of a JSON file)")
    if len(given) > 1:
        raise ValueError(f"initialize: {' and '.join(given)}: pass one of them")
    return next(value for value in (config, config_params, by_args) if value is not None)


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers an engine has sharded: destroy() does not make them whole again."""
    name = next((name for name, _, _ in sharded_parameters(model)), None)
    if name is not None:
        raise ValueError(
            f"initialize: {name} is sharded over tensor-parallel ranks already, by an engine before: build the model "
            "anew, and load_checkpoint what that one saved"
        )


def check_parameters(model: nn.Module, config: Config) -> None:
    """Raise ValueError for what no setting of the engine can train."""
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ValueError(f"initialize: {name} is complex, which the engine does not train; keep its real view")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and config.zero_optimization.stage >= 2:
            raise ValueError(
                f"initialize: {name or 'the model'} is an embedding with sparse=True, and its gradients travel as rows "
                "in ZeRO stages 0 and 1 only: write one of these, or sparse=False"
            )


def check_listed(listed: list[Any] | None, model: nn.Module) -> None:
    """Raise ValueError for `model_parameters` that are not those of `model`."""
    if listed is None:
        return
    known = set(model.parameters())
    for param in [p for group in groups_of(listed) for p in group["params"]]:
        if param not in known:
            raise ValueError(
                f"initialize: model_parameters has a parameter of shape {tuple(param.shape)} that the model does not "
                "have; pass those of the same model"
            )
    if not listed and any(param.requires_grad for param in known):
        raise ValueError(
            "initialize: model_parameters is empty, and the model has parameters to train: leave it out, or list them "
            "when the model has its layers (a PipelineModule without num_stages has none before)"
        )


def in_vain(optimizer: Any, scheduler: Any, config: Config) -> Iterator[str]:
    """What the configuration says without effect beside what the script passes."""
    if optimizer is not None and config.optimizer is not None:
        yield "optimizer: has no effect; the script passes its own to initialize"
    if scheduler is not None and config.scheduler is not None:
        yield "scheduler: has no effect; the script passes its own to initialize"
    elif optimizer is None and config.optimizer is None and config.scheduler is not None:
        yield 'scheduler: has no effect; there is no optimizer: write "optimizer" too, or pass one to initialize'


def compare(listed: list[dict[str, Any]], stepped: list[dict[str, Any]]) -> None:
    """Warn if `model_parameters` are others than those of the script's optimizer, which counts."""
    ours, theirs = ({id(p) for group in groups for p in group["params"] if p.requires_grad}
                    for groups in (listed, stepped))  # fmt: skip
    if ours != theirs:
        warnings.warn(
            f"initialize: model_parameters has {len(ours - theirs)} parameters to train that optimizer= has not, and "
            f"not {len(theirs - ours)} that it has; it has no effect: the optimizer's own are trained",
            stacklevel=4,
        )


def groups_of(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameters, or (name, parameter) pairs, or parameter groups, as parameter groups."""
    if parameters and isinstance(parameters[0], dict):
        return [{**group, "params": _plain(group["params"])} for group in parameters]
    return [{"params": _plain(parameters)}]


def _plain(parameters: Any) -> list[Any]:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [item[1] if isinstance(item, tuple) else item for item in listed]
