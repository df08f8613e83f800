"""What is trained, and how: one object that steps work on, checkpoints save, and engines own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .comm.comm import Comm
from .comm.mesh import Parallel
from .comm.peers import Peers
from .config import Config
from .hooks import Hooks
from .offload import States
from .optim.loss_scaler import LossScaler
from .sequence import SequenceParallel
from .zero import Zero
from .zero.shared_params import SharedParameters


@dataclass(eq=False, repr=False, slots=True)
class Training:
    """A model, what trains it, and how far that is."""

    module: nn.Module
    config: Config
    zero: Zero
    parallel: Parallel
    """This rank's place in the mesh, and its process groups."""
    shared: SharedParameters
    """Parameters that other ranks of this replica hold, too."""
    scaler: LossScaler
    states: States
    """Masters and the optimizer's states, wherever they are between steps."""
    hooks: Hooks
    peers: Peers
    sequence: SequenceParallel | None = None
    """Among ranks that share sequences; None where each has its own."""
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps: int = 0
    """Steps taken, those that an overflow skipped among them."""
    global_samples: int = 0
    """Samples seen, over all replicas."""
    micro_steps: int = 0
    """Micro-batches seen on this rank."""
    under_way: int = 0
    """Of them, those of a step that is not complete yet."""
    skipped_steps: int = 0
    failure: str | None = None
    """What broke off a step, or a load, that had begun to change things; None if nothing has."""
    loss_weight: float = field(init=False)
    """What this replica's mean loss counts in the mean over all: its samples beside those of an equal share. It stays:
    batch sizes that are set later change all replicas' alike."""

    def __post_init__(self) -> None:
        samples = self.config.train_micro_batch_size_per_gpu * self.parallel.mesh.replicas
        self.loss_weight = samples / self.samples_per_microbatch

    def fail(self, what: str, error: BaseException) -> None:
        """`what` (a step, a load) has failed half-way on this rank: weights, gradients and the optimizer's state may be
        of two steps at once, until a checkpoint is loaded. The first cause is kept."""
        if self.failure is None:
            self.failure = f"{what} failed half-way: {type(error).__name__}: {error}"

    def refuse_lost(self, doing: str, error: type[RuntimeError] = RuntimeError) -> None:
        """Raise `error` if the connections between the ranks are closed: nothing can be done together any more."""
        if self.zero.lost:
            raise error(
                f"{doing}: this engine's ranks have lost each other: {self.failure}. No checkpoint can be loaded any "
                "more: end the job, and start it again from a checkpoint"
            )

    def refuse_failed(self, doing: str, error: type[RuntimeError] = RuntimeError) -> None:
        """Raise `error` if something has failed half-way."""
        self.refuse_lost(doing, error)
        if self.failure is not None:
            raise error(
                f"{doing}: {self.failure}. Weights, gradients or the optimizer's state may be neither the old ones nor "
                "the new: go on from a checkpoint, by engine.load_checkpoint or with a new engine"
            )

    def recover(self) -> None:
        """All that a step changes has been loaded."""
        self.failure = None

    def count_microbatch(self) -> None:
        """One more of the step under way has been seen."""
        self.micro_steps += 1
        self.under_way += 1
        self.global_samples += self.samples_per_microbatch

    def begin_step(self) -> None:
        """The micro-batches so far made a step, or are to be forgotten."""
        self.under_way = self.hooks.microbatch = 0

    @property
    def samples_per_microbatch(self) -> int:
        """Over all replicas."""
        return self.config.train_batch_size // self.config.gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's; none without one."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def comms(self) -> list[Comm]:
        """Every communicator of this rank, its lanes' too."""
        sequence = [] if self.sequence is None else [self.sequence.comm]
        return [*self.parallel.all(), *self.zero.comms, *sequence]

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.param_groups]

    def momenta(self) -> list[Any]:
        """The momentum (SGD) or betas (Adam) of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.param_groups]
