"""What libraries around DeepSpeed ask an engine: Accelerate, Transformers, Lightning. Names are DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from ..checkpoint import Trainee
from ..checkpoint.consolidate import collect
from ..data import WORKERS, ShardedLoader
from .settings import Settings

if TYPE_CHECKING:
    from ..comm.groups import Parallel
    from ..zero import Zero


@dataclass
class Throughput:
    """As much of DeepSpeed's timer as scripts call. Samples a second are in what `steps_per_print` prints."""

    epoch_count: int = 0

    def update_epoch_count(self) -> None:
        """An epoch is over."""
        self.epoch_count += 1


class Surface(Settings):
    """That part of an Engine."""

    def __init__(self) -> None:
        super().__init__()
        self.tput_timer = Throughput()

    module: nn.Module
    zero: Zero
    parallel: Parallel
    training_dataloader: Any
    micro_steps: int

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Have a step take so many samples from now on, in more or fewer micro-batches of the same size.

        Raises ValueError if they do not make up whole micro-batches on every replica, RuntimeError within a step."""
        each = self.config.train_micro_batch_size_per_gpu * self.parallel.mesh.dp
        if train_batch_size < 1 or train_batch_size % each:
            raise ValueError(
                f"set_train_batch_size: {train_batch_size} samples are no multiple of the {each} of a micro-batch over "
                f"the {self.parallel.mesh.dp} replicas; write {max(1, round(train_batch_size / each)) * each}"
            )
        before = self.config.gradient_accumulation_steps
        if self.micro_steps % before:
            raise RuntimeError("set_train_batch_size in the middle of a step: call it after a step has been taken")
        sizes = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": train_batch_size // each}
        self.config = self.config.model_copy(update=sizes)
        self.micro_steps = self.micro_steps // before * sizes["gradient_accumulation_steps"]  # so that a step begins

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Count so many samples in each micro-batch that the script passes from now on, and as many micro-batches.

        Raises RuntimeError if the engine made the loader, whose batches have the size that they had."""
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size: {micro_batch_size} samples; write 1 or more")
        if isinstance(self.training_dataloader, ShardedLoader):
            raise RuntimeError(
                "set_train_micro_batch_size: the loader that initialize made goes on with batches of "
                f"{self.training_dataloader.batch_size} samples; pass a loader of your own as train_dataloader="
            )
        samples = micro_batch_size * self.config.gradient_accumulation_steps * self.parallel.mesh.dp
        sizes = {"train_batch_size": samples, "train_micro_batch_size_per_gpu": micro_batch_size}
        self.config = self.config.model_copy(update=sizes)

    def empty_partition_cache(self) -> None:
        """Release parameters that stage 3 keeps for their next use, and memory that the device's allocator keeps."""
        if self.zero.fetcher is not None:
            self.zero.fetcher.finish_backward()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_data_parallel_rank(self) -> int:
        """Which replica this rank is of."""
        return self.parallel.mesh.dp_rank

    def get_tensor_parallel_rank(self) -> int:
        """Which part of each layer this rank has."""
        return self.parallel.mesh.tp_rank

    get_model_parallel_rank = get_tensor_parallel_rank

    def deepspeed_io(
        self,
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
        mesh = self.parallel.mesh
        return ShardedLoader(
            dataset,
            batch_size=batch_size or self.config.train_micro_batch_size_per_gpu,
            rank=mesh.dp_rank,
            world_size=mesh.dp,
            collate_fn=collate_fn,
            sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self.config.dataloader_drop_last,
            num_workers=WORKERS if num_local_io_workers is None else num_local_io_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The state dict of the model as this rank has it. Raises RuntimeError in stage 3, where that is pieces."""
        if self.zero_optimization_partition_weights():
            raise RuntimeError(
                "engine.module_state_dict: in ZeRO stage 3 parameters are in pieces: write engine.save_16bit_model, or "
                "ask for it within zero.GatheredParameters(engine.module.parameters())"
            )
        state: dict[str, Tensor] = self.module.state_dict()
        if exclude_frozen_parameters:
            params = self.module.named_parameters(remove_duplicate=False)
            frozen = {name for name, param in params if not param.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state

    def load_module_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Give the model these weights, on all ranks the same; the optimizer goes on from them.

        `custom_load_fn(src=state_dict, dst=module)` may do the copying.
        """
        from ..zero import GatheredParameters

        with GatheredParameters(self.module, modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=state_dict, dst=self.module)
            else:
                self.module.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole model's state dict on rank 0, in host memory, whatever divides it; elsewhere it is empty. On all
        ranks. Transformers and Accelerate save models by it."""
        return collect(cast(Trainee, self), with_frozen=not exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        saved: bool = cast(Any, self).save_16bit_model(save_dir, save_filename)
        return saved
