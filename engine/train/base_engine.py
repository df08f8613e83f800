"""What an engine of either kind is: a training, what takes its steps, what reports them, and DeepSpeed's names."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from .. import checkpoint
from ..activation_checkpoint.policies import repeated_blocks
from ..comm.consensus import LostError, reason
from ..comm.mesh import Parallel
from ..config import Config
from ..data import endless
from ..hooks import Hooks
from ..offload import States
from ..optim.loss_scaler import LossScaler
from ..pipe.module import PipelineModule
from ..tensor.check_data import check_same, check_shares
from ..training_state import Training
from ..zero import Zero
from ..zero.validate import UNCOMPILED
from .deepspeed_api import ENGINE, Names, Throughput
from .metrics import Metrics
from .optimizer_step import OptimizerStep

CHECK_DATA_EVERY: Final = 50
"""Steps after which tensor-parallel ranks are held to the same data again; they are in the first, too."""

P = ParamSpec("P")
T = TypeVar("T")


def _of_training(name: str) -> Any:
    """An attribute of an engine that is its training's, to read and to set."""

    def read(engine: BaseEngine) -> Any:
        return getattr(engine.state, name)

    def write(engine: BaseEngine, value: Any) -> None:
        setattr(engine.state, name, value)

    return property(read, write)


def _of_checkpoint(
    name: str,
    function: Callable[Concatenate[Training, P], T],
    prepare: Callable[[OptimizerStep], object] = lambda step: None,
    *,
    loads: bool = False,
) -> Callable[Concatenate[BaseEngine, P], T]:
    """`function` as a method of engines, of their training. One that `loads` leaves no gradients, nor a part of a
    step."""

    def method(engine: BaseEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine._refuse_destroyed()
        engine.state.refuse_lost(name, checkpoint.CheckpointError)
        with engine._failing(name):
            prepare(engine.optimizer_step)
            result = function(engine.state, *args, **kwargs)
            if loads and result != (None, None):
                engine._begin_step_anew()
                if engine.zero.deadlocks is not None:
                    engine.zero.deadlocks.recovered()
        return result

    functools.update_wrapper(method, function)
    method.__name__ = method.__qualname__ = name
    return method


class BaseEngine(nn.Module):
    """A model that trains. Engine runs it as one; PipelineEngine runs the stages of it that are here."""

    names: ClassVar[Names] = ENGINE
    """What this answers to beside its methods."""

    config: Config = _of_training("config")
    zero: Zero = _of_training("zero")
    parallel: Parallel = _of_training("parallel")
    optimizer: Optimizer | None = _of_training("optimizer")
    lr_scheduler: Any = _of_training("lr_scheduler")
    scaler: LossScaler = _of_training("scaler")
    states: States = _of_training("states")
    hooks: Hooks = _of_training("hooks")
    training_dataloader: Any = _of_training("training_dataloader")
    global_steps: int = _of_training("global_steps")
    global_samples: int = _of_training("global_samples")
    micro_steps: int = _of_training("micro_steps")
    skipped_steps: int = _of_training("skipped_steps")

    def __init__(
        self,
        training: Training,
        opened: contextlib.ExitStack,
        progress: Callable[[float], str] | None = None,
    ) -> None:
        """`opened` takes the training off its model when it is closed. `progress`: see Metrics."""
        super().__init__()
        self.state = training
        self.module = training.module
        self._opened = opened
        self.optimizer_step = OptimizerStep(training)
        opened.callback(self.optimizer_step.close)
        self.metrics = Metrics(training, progress)
        opened.callback(self.metrics.monitors.stop)
        self.tput_timer = Throughput()
        self._own_data: Iterator[Any] | None = None
        self._frozen = [param for param in training.zero.params if not param.trainable]
        self._norm: float | Tensor | None = None
        self._stepped = False
        self._unequal_shares = training.config.unequal_shares(training.parallel.mesh.size)
        """Samples of each replica in a micro-batch, where they differ."""
        self._shares_unchecked = self._unequal_shares is not None
        """Whether no batch has been held against them yet."""
        self._destroyed = False

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first."""
        return None if self._norm is None else float(self._norm)

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights: not at every micro-batch, and not after an overflow."""
        return self._stepped

    def log_summary(self, show_straggler: bool = False) -> None:
        """Print the table of communications so far (`comms_logger`); with `show_straggler` on all ranks at once."""
        comms = self.metrics.monitors.comms
        if comms is None:
            raise RuntimeError('engine.log_summary: write "comms_logger": {"enabled": true} in the configuration')
        comms.log_summary(show_straggler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients there are, and begin the step anew: its micro-batches so far count no more.

        After an error that the script catches: on all ranks. Elsewhere it is not needed, since a step that was taken
        leaves no gradients.
        """
        forgotten, each = self.state.under_way, self.config.gradient_accumulation_steps
        if forgotten and each > 1:
            warnings.warn(
                f"engine.zero_grad() in the middle of a step: {forgotten} of its {each} micro-batches are forgotten, "
                "and the step begins anew. A step forgets its gradients by itself: called before each backward, "
                "engine.zero_grad() lets no step be completed",
                stacklevel=2,
            )
        self._begin_step_anew()

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Have the model compiled, with options of `torch.compile` as `compile_kwargs` or by name.

        With several ranks, each of the model's repeated blocks is compiled by itself, and the rest is left as it is:
        the gradients of a model that is compiled as one come all at its end, too late to be reduced meanwhile. A model
        without such blocks is compiled as one; of a pipeline, every layer by itself.

        Raises RuntimeError where parameters come and go: in stage 3.
        """
        if self.zero.fetcher is not None:
            raise RuntimeError(f"engine.compile: {UNCOMPILED}")
        overlaps = self.zero.size > 1 and not isinstance(self.module, PipelineModule)
        blocks = list(repeated_blocks(self.module).values()) if overlaps else []
        for each in blocks or [self.module]:
            each.compile(backend=backend, **(compile_kwargs or {}), **more)

    save_checkpoint = _of_checkpoint("save_checkpoint", checkpoint.save, OptimizerStep.take_edits)
    load_checkpoint = _of_checkpoint("load_checkpoint", checkpoint.load, OptimizerStep.before_load, loads=True)
    save_16bit_model = _of_checkpoint("save_16bit_model", checkpoint.save_16bit_model, OptimizerStep.take_moved)

    def destroy(self) -> None:
        """Take the engine off the model, which has its present weights; end its threads, close its files, and destroy
        its process groups. On all ranks; again is of no effect.

        What ZeRO has sharded is whole again; a pipeline's rank keeps its layers, and a tensor-parallel one its shard of
        each: `save_16bit_model` writes the whole model. An optimizer of the script's has the model's parameters again,
        and what it keeps of those that this rank stepped whole, in their precision; what was sharded or offloaded
        begins anew. To train on is an error. If ranks have lost each other, what is sharded is lost (a warning)."""
        if self._destroyed:
            return
        self._destroyed = True
        self._own_data = None  # ends its workers, for which a garbage collection would wait
        self._opened.close()

    # --- names of DeepSpeed's, and of the model's

    def __getattr__(self, name: str) -> Any:
        """What is in the table; what is not, such as `generate`, is the model's."""
        if name in self.names and "state" in self.__dict__:
            return self.names.find(name, self.state)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "state", "__deepcopy__"):  # a model that can be copied is no engine that can
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            unsupported, model = self.names.unsupported, type(self.module).__name__
            instead = f": {unsupported[name]}" if name in unsupported else f", and neither has its {model}"
            raise AttributeError(f"the engine has no {name!r}{instead}") from None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """For `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`: two engines would train one model."""
        raise TypeError(
            "an engine cannot be copied, pickled or written by torch.save: it has threads, process groups and this "
            "rank's shards of its model; write engine.save_checkpoint(folder) to go on later, "
            "engine.save_16bit_model(folder) for the model alone, or copy engine.module"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.names})  # type: ignore[no-untyped-call]

    # --- inside

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Take a step of the gradients that there are, report it, and count it."""
        try:
            result = self.optimizer_step.take()
        except BaseException:
            if self.state.failure is None:  # nothing has been changed: the step is to be forgotten
                self._begin_step_anew()
            raise
        self._norm, self._stepped = result.norm, not result.overflow
        try:
            if self.state.lr_scheduler is not None and not result.overflow:
                self.state.lr_scheduler.step(**lr_kwargs)
            self.metrics.report()
        finally:  # it is taken, whether or not the schedule goes on, or that can be reported
            self.global_steps += 1
            self.hooks.step = self.global_steps
            self.state.begin_step()

    def _begin_step_anew(self) -> None:
        """Be as before the first micro-batch of the step under way."""
        forgotten = self.state.under_way
        self.zero.forget_gradients()
        self.micro_steps -= forgotten
        self.global_samples -= forgotten * self.state.samples_per_microbatch
        self.state.begin_step()
        self.metrics.forget_losses()

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """What is raised in the block may keep other ranks waiting: they are told why. Raises SharedError, which names
        the rank that has failed, in the place of an error that says no more than that it is not there."""
        try:
            yield
        except Exception as error:
            self._failed(doing, error)
            raise

    def _failed(self, doing: str, error: Exception, withheld: Sequence[str] = ()) -> None:
        """`withheld`: what this rank begins no more before all ranks begin anew."""
        peers, watch = self.state.peers, self.zero.deadlocks
        lost = isinstance(error, LostError)
        told = peers.explain(f"engine.{doing}", error)
        if told is not None or lost:
            self.state.failure = None  # which may be the same, in fewer words
            self.state.fail("an earlier step of this engine", told or error)
            self.zero.lost = True
            peers.give_up()  # those that wait for this one go on no more than it does
        if told is not None:
            raise told from error
        peers.note(f"engine.{doing} in step {self.global_steps}", error)
        if withheld and watch is not None and not lost:
            watch.failed(f"engine.{doing} in step {self.global_steps}: {reason(error)}", withheld)

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Where the next micro-batch comes from: what was passed, else the engine's own data over and over."""
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise ValueError("train_batch: pass an iterator of batches, or training_data to initialize")
        self._own_data = self._own_data or endless(self.training_dataloader)
        return self._own_data

    def _check_data(self, batch: Any) -> None:
        """Raise ValueError on all tensor-parallel ranks if they are about to train on different data."""
        if self.parallel.tensor.size > 1 and self.global_steps % CHECK_DATA_EVERY == 0:
            check_same(batch, self.parallel.tensor)

    def _check_shares(self, shapes: list[tuple[int, ...]]) -> None:
        """Hold the first batch against this replica's share, by what the others have. On all replicas."""
        self._shares_unchecked = False
        check_shares(shapes, self._unequal_shares or (), self.parallel.data)

    def _refuse_destroyed(self) -> None:
        if self._destroyed:
            raise RuntimeError(
                "the engine was destroyed: its model, engine.module, is as any other; to train on, call initialize "
                "again"
            )
        self.state.peers.check("the engine")

    def _refuse_without_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(f"{what}: there is no optimizer: pass one to initialize, or configure `optimizer`")
