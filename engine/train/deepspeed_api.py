"""What scripts and libraries ask of an engine by DeepSpeed's names, in tables.

What training consists of are methods of the engines; the rest stands here, and an engine finds it when it is asked.
Accelerate, Transformers and Lightning ask for much of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .. import checkpoint, unsupported
from ..data import WORKERS, ShardedLoader
from ..pipe.module import PipelineModule
from ..pipe.p2p import PipelineError
from ..pipe.topology import Placement
from ..training_state import Training
from ..zero import GatheredParameters
from .settings import SETTINGS, communication_dtype, documented


@dataclass(frozen=True)
class Names:
    """What an engine answers to beside its own methods."""

    attributes: Mapping[str, Callable[[Training], Any]]
    """Name -> its value."""
    methods: Mapping[str, Callable[..., Any]]
    """Name -> a function of the training and the caller's arguments."""
    unsupported: Mapping[str, str]
    """Name -> what to write in its place."""

    def __contains__(self, name: object) -> bool:
        return name in self.attributes or name in self.methods

    def __iter__(self) -> Iterator[str]:
        return iter((*self.attributes, *self.methods))

    def find(self, name: str, training: Training) -> Any:
        """What the engine of `training` has by `name`, which is in this."""
        if name in self.attributes:
            return self.attributes[name](training)
        return MethodType(_by_name(name, self.methods[name]), training)


def _by_name(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the name that it has in a table, for `help` and tracebacks: it may be in several."""

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method


@dataclass
class Throughput:
    """As much of DeepSpeed's timer as scripts call. Samples a second are in what `steps_per_print` prints."""

    epoch_count: int = 0

    def update_epoch_count(self) -> None:
        """An epoch is over."""
        self.epoch_count += 1


_ATTRIBUTES: Final[Mapping[str, Callable[[Training], Any]]] = {
    "communication_data_type": communication_dtype,
    "device": lambda training: training.device,
    "loss_scale": lambda training: training.scaler.scale,
    "global_rank": lambda training: training.parallel.mesh.rank,
    "local_rank": lambda training: int(os.environ.get("LOCAL_RANK", "0")),
    "world_size": lambda training: training.parallel.mesh.size,
    "dp_world_size": lambda training: training.zero.size,
}


# --- what does more than answer


def _optimizer_name(training: Training) -> str | None:
    """The type in the configuration, in lower case; of an optimizer of the script's, its class."""
    if training.config.optimizer is not None:
        return training.config.optimizer.type.lower()
    return None if training.optimizer is None else type(training.optimizer).__name__


def _set_train_batch_size(training: Training, train_batch_size: int) -> None:
    """Have a step take so many samples from now on, in more or fewer micro-batches of the same size.

    Raises ValueError if they do not make up whole micro-batches on every replica, RuntimeError within a step."""
    each = training.samples_per_microbatch
    if train_batch_size < 1 or train_batch_size % each:
        raise ValueError(
            f"set_train_batch_size: {train_batch_size} samples are no multiple of the {each} of a micro-batch over "
            f"the {training.parallel.mesh.replicas} replicas; write {max(1, round(train_batch_size / each)) * each}"
        )
    if training.under_way:
        raise RuntimeError("set_train_batch_size in the middle of a step: call it after a step has been taken")
    sizes = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": train_batch_size // each}
    training.config = training.config.model_copy(update=sizes)


def _set_train_micro_batch_size(training: Training, micro_batch_size: int) -> None:
    """Count so many samples in each micro-batch that the script passes from now on, and as many micro-batches.

    Raises RuntimeError if the engine made the loader, whose batches have the size that they had."""
    if micro_batch_size < 1:
        raise ValueError(f"set_train_micro_batch_size: {micro_batch_size} samples; write 1 or more")
    if isinstance(training.training_dataloader, ShardedLoader):
        raise RuntimeError(
            "set_train_micro_batch_size: the loader that initialize made goes on with batches of "
            f"{training.training_dataloader.batch_size} samples; pass a loader of your own as train_dataloader="
        )
    if training.config.unequal_shares(training.parallel.mesh.size) is not None:
        raise RuntimeError(
            "set_train_micro_batch_size: the replicas have unequal shares of a micro-batch (heterogeneous.speeds): "
            "write another batch size in the configuration"
        )
    samples = micro_batch_size * training.config.gradient_accumulation_steps * training.parallel.mesh.replicas
    sizes = {"train_batch_size": samples, "train_micro_batch_size_per_gpu": micro_batch_size}
    training.config = training.config.model_copy(update=sizes)


def _empty_partition_cache(training: Training) -> None:
    """Release parameters that stage 3 keeps for their next use, and memory that the device's allocator keeps."""
    if training.zero.fetcher is not None:
        training.zero.fetcher.finish_backward()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _deepspeed_io(
    training: Training,
    dataset: Dataset[Any],
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> ShardedLoader:
    """A loader of this rank's share of `dataset`, as `initialize(training_data=)` makes one, with another number of
    workers if `num_local_io_workers` says so. On the routes `eval` and `predict` it does not shuffle."""
    if route not in ("train", "eval", "predict"):
        raise ValueError(f"engine.deepspeed_io: route={route!r}; write train, eval or predict")
    mesh, config = training.parallel.mesh, training.config
    return ShardedLoader(
        dataset,
        batch_size=batch_size or config.train_micro_batch_size_per_gpu,
        rank=mesh.replica,
        world_size=mesh.replicas,
        collate_fn=collate_fn,
        sampler=data_sampler,
        shuffle=route == "train",
        drop_last=config.dataloader_drop_last,
        num_workers=WORKERS if num_local_io_workers is None else num_local_io_workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
        shares=config.unequal_shares(mesh.size) if batch_size is None else None,
    )


def _module_state_dict(training: Training, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
    """The state dict of the model as this rank has it. Raises RuntimeError in stage 3, where that is shards."""
    if training.zero.settings.stage >= 3:
        raise RuntimeError(
            "engine.module_state_dict: in ZeRO stage 3 parameters are sharded: write engine.save_16bit_model, or "
            "ask for it within zero.GatheredParameters(engine.module.parameters())"
        )
    state: dict[str, Tensor] = training.module.state_dict()
    if exclude_frozen_parameters:
        params = training.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in params if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def _load_module_state_dict(
    training: Training, state_dict: dict[str, Tensor], strict: bool = True, custom_load_fn: Any = None
) -> None:
    """Give the model these weights, on all ranks the same; the optimizer goes on from them.

    `custom_load_fn(src=state_dict, dst=module)` may do the copying.
    """
    with GatheredParameters(training.module, modifier_rank=0):
        if custom_load_fn is not None:
            custom_load_fn(src=state_dict, dst=training.module)
        else:
            training.module.load_state_dict(state_dict, strict=strict)


def _consolidated(training: Training, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
    """The whole model's state dict on rank 0, in host memory, however it is sharded; elsewhere it is empty. On all
    ranks. Transformers and Accelerate save models by it."""
    return checkpoint.consolidated(training, with_frozen=not exclude_frozen_parameters)


_METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    **SETTINGS,
    "optimizer_name": _optimizer_name,
    "get_lr": Training.learning_rates,
    "get_mom": Training.momenta,
    "get_data_parallel_rank": documented("Which replica this rank is of.", lambda t: t.parallel.mesh.replica),
    **dict.fromkeys(
        ("get_tensor_parallel_rank", "get_model_parallel_rank"),
        documented("Which part of each layer this rank has.", lambda t: t.parallel.mesh.tp_rank),
    ),
    "get_sequence_parallel_group": documented(
        "The ranks that this one shares sequences with; None without any.",
        lambda t: None if t.sequence is None else t.sequence.comm.group,
    ),
    "set_train_batch_size": _set_train_batch_size,
    "set_train_micro_batch_size": _set_train_micro_batch_size,
    "empty_partition_cache": _empty_partition_cache,
    "deepspeed_io": _deepspeed_io,
    "module_state_dict": _module_state_dict,
    "load_module_state_dict": _load_module_state_dict,
    "save_fp16_model": checkpoint.save_16bit_model,
    "_zero3_consolidated_16bit_state_dict": _consolidated,
    "_consolidated_16bit_state_dict": _consolidated,
}

ENGINE: Final = Names(_ATTRIBUTES, _METHODS, unsupported.ENGINE)


# --- pipelines


def _placement(training: Training) -> Placement:
    assert isinstance(training.module, PipelineModule)
    return training.module.placement


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(training: Training, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(what)

    refuse.__doc__ = f"Is an error: {what}."
    return refuse


def _needless(training: Training, *args: Any) -> None:
    """Does nothing: a step has all its micro-batches, and what stages send says its shapes itself, masks too."""


STEPS_ARE_WHOLE: Final = "a pipeline trains by engine.train_batch(data_iter) and is tried by engine.eval_batch"

PIPELINE_ENGINE: Final = Names(
    attributes={
        **_ATTRIBUTES,
        "grid": lambda training: _placement(training).mpu(),
        "mpu": lambda training: _placement(training).mpu(),
        "stage_id": lambda training: training.parallel.mesh.pp_rank,
        "prev_stage": lambda training: training.parallel.mesh.pp_rank - 1,
        "next_stage": lambda training: training.parallel.mesh.pp_rank + 1,
        "num_stages": lambda training: training.parallel.mesh.pp,
        "micro_batches": lambda training: training.config.gradient_accumulation_steps,
        "micro_batch_size": lambda training: training.config.train_micro_batch_size_per_gpu,
        "is_pipe_parallel": lambda training: training.parallel.mesh.pp > 1,
        "is_data_parallel": lambda training: training.parallel.mesh.dp > 1,
        "is_model_parallel": lambda training: training.parallel.mesh.tp > 1,
    },
    methods={
        **_METHODS,
        "get_pipeline_parallel_rank": documented(
            "This rank's place in the pipeline.", lambda training: training.parallel.mesh.pp_rank
        ),
        "is_first_stage": documented(
            "Whether this rank has the first layers.", lambda training: _placement(training).is_first()
        ),
        "is_last_stage": documented(
            "Whether this rank has the last layers.", lambda training: _placement(training).is_last()
        ),
        "is_gradient_accumulation_boundary": documented(
            "True: a step has all its micro-batches.", lambda training: True
        ),
        **dict.fromkeys(
            ("set_gradient_accumulation_boundary", "reset_activation_shape", "set_has_attention_mask"), _needless
        ),
        "forward": _refused(STEPS_ARE_WHOLE),
        "backward": _refused(STEPS_ARE_WHOLE),
        "step": _refused(STEPS_ARE_WHOLE),
        "no_sync": _refused(
            "engine.no_sync: train_batch runs all micro-batches of a step, and reduces gradients once in ZeRO stages 0 "
            'and 1; leave it out, and write "gradient_accumulation_steps" in the configuration'
        ),
    },
    unsupported={**unsupported.ENGINE, **unsupported.PIPELINE_ENGINE, **unsupported.PIPELINE_MODULE},
)
