"""A model is tried: run once on a few tokens, with stand-ins for its weights and for what its layers answer.

Nothing of the model's own weights is read, and no matrix product is computed: a layer that can be sharded answers with
random numbers, and everything between two layers is computed as the model has it. So a trial of a large model takes
little time and memory, wherever its weights are.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from dsprof.words import joined

from ..tensor.layers import Layer, derived, is_batch_norm, layers_of
from ..tensor.shape_override import plain
from ..tree import leaves
from .example_inputs import Inputs

_log: Final = logging.getLogger(__name__)

_HOLDERS: Final = (dict, OrderedDict, list, set)

_WIDE: Final = 1 << 20
"""Elements of a buffer at most for which it is asked what depends on it."""

Answer = Callable[[str, Layer, Tensor], Tensor]
"""What a layer answers: its name, what it is, and its input -> its output."""


@dataclass(eq=False)
class Call:
    """One use of a layer."""

    module: str
    layer: Layer
    read: Tensor
    """Its input, with the graph that leads back to the layers before."""

    given: Tensor
    """Its input, the very object: layers that read the same one share what is done with it."""

    wrote: Tensor
    """The stand-in that it answered with: a leaf of the graph."""

    drawn: int = 0
    """Differs between two calls if random numbers were drawn between them, in training."""


@dataclass(frozen=True)
class _Answering:
    """A layer, or a batch norm, whose class is another one while the model is tried."""

    module: nn.Module
    own: type[nn.Module]
    tried: type[nn.Module]
    name: str
    layer: Layer | None
    """None: of a batch norm, which computes."""


@dataclass(eq=False)
class Trial:
    """What was seen of `root`, a module of the model, running by itself. Its modules stay the same meanwhile."""

    root: str
    module: nn.Module
    inputs: Inputs
    stand_ins: Mapping[str, Tensor]
    calls: list[Call] = field(default_factory=list)
    returned: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    """The floating-point tensors in what it returned."""

    trains: bool = False
    """Whether it runs in training mode too: `note_randomness`."""

    trained: list[Tensor] = field(default_factory=list)
    """What it returned then; there may be more or fewer of them."""

    joined: Tensor | None = None
    """What the last of the blocks gave in which the sequence is sharded, if it was asked for."""

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that were tried, by their names in the model."""
        return {joined(self.root, name): module for name, module in self.module.named_modules()}

    @cached_property
    def places(self) -> dict[str, str]:
        """Every place of a parameter or a buffer -> the name of its stand-in. Each module once: torch puts things back
        in the order of the places, and would leave a stand-in in a module that has two."""
        first = {id(x): name for name, x in (*self.module.named_parameters(), *self.module.named_buffers())}
        return {
            f"{prefix}.{key}" if prefix else key: first[id(x)]
            for prefix, owner in self.module.named_modules()
            for key, x in (*owner._parameters.items(), *owner._buffers.items())
            if x is not None
        }

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of stand-ins that a forward may write to."""
        return frozenset(name for name, _ in self.module.named_buffers())

    @cached_property
    def answering(self) -> list[_Answering]:
        """What does not compute as it does otherwise."""
        norms = [module for module in self.module.modules() if is_batch_norm(module)]
        found = [_Answering(norm, type(norm), derived(norm, _BatchNormTrial), "", None) for norm in norms]
        for name, layer in layers_of(self.module).items():
            module = self.module.get_submodule(name)
            tried = derived(module, _TRIED[layer.kind])
            found.append(_Answering(module, type(module), tried, joined(self.root, name), layer))
        return found

    def numbered(self) -> dict[tuple[str, int], Call]:
        """Calls by module, and number among that module's calls."""
        count: Counter[str] = Counter()
        found = {}
        for call in self.calls:
            found[call.module, count[call.module]] = call
            count[call.module] += 1
        return found


def observe(name: str, module: nn.Module, inputs: Inputs) -> Trial:
    """Run `module`, whose name is `name`, and note what its layers read. Raises what its forward raises."""
    stand_ins = _stand_ins(module)
    trial = Trial(name, module, inputs.leaves(), stand_ins)

    def answer(name: str, layer: Layer, x: Tensor) -> Tensor:
        x = plain(x)
        shape = (*x.shape, layer.outputs) if layer.kind == "embedding" else (*x.shape[:-1], layer.outputs)
        # Between 0 and 1, where hardly an activation function is flat.
        wrote = torch.rand(shape).mul_(0.8).add_(0.1).requires_grad_()
        trial.calls.append(Call(name, layer, x.clone() if x.is_floating_point() else x, x, wrote))
        return wrote.clone()

    trial.returned = run(trial, answer)
    trial.outputs = tensors_of(trial.returned)
    return trial


def note_randomness(trial: Trial) -> None:
    """Say of each call where the generator stood, in training, if the module runs in training mode on so few tokens."""
    again = iter(trial.calls)

    def answer(name: str, layer: Layer, x: Tensor) -> Tensor:
        call = next(again)  # one call more than before is an error, too
        call.drawn = hash(torch.default_generator.get_state().numpy().tobytes())
        return call.wrote.detach().clone()

    try:
        trial.trained = tensors_of(run(trial, answer, training=True))
    except Exception:  # a batch norm over one value, for instance
        _log.debug("%s could not be tried in training", trial.root or "the model", exc_info=True)
        return
    trial.trains = next(again, None) is None


def run_again(trial: Trial) -> None:
    """Run the tried module with the answers that it had."""
    calls = iter(trial.calls)
    run(trial, lambda name, layer, x: next(calls).wrote.detach().clone())


def run(
    trial: Trial, answer: Answer, *, training: bool = False, part: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """What the tried module returns, with `answer` in its layers' place, and `part` of the stand-ins' names and values
    in that of the stand-ins. The process's generator is left as it was, and so are attributes of the modules: what a
    forward counts, or keeps for the next one, is not of these inputs. Nothing is compiled."""
    with _restored(trial.modules.values()), _uncompiled():
        trial.module.train(training)
        with torch.random.fork_rng(devices=[]), _keeping(), _answered(trial, answer):
            torch.default_generator.manual_seed(0)
            # A forward may empty what holds its inputs, and write to buffers.
            inputs = trial.inputs.replaced(lambda x: x)
            stand_ins = {name: x.clone() if name in trial.buffers else x for name, x in trial.stand_ins.items()}
            if part is not None:
                stand_ins = {name: part(name, x) for name, x in stand_ins.items()}
            everywhere = {place: stand_ins[name] for place, name in trial.places.items()}
            return functional_call(trial.module, everywhere, inputs.args, dict(inputs.kwargs), tie_weights=False)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run what torch.compile was asked to compile as it is written. If the compiler is not loaded, there is nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards the modules have the attributes that they have now: the same objects, not copies; and the dicts (of
    buffers and hooks, for instance), lists and sets among them hold the same."""
    before: list[tuple[Any, Any]] = []
    for module in modules:
        before.append((vars(module), dict(vars(module))))
        before += [(held, held.copy()) for held in vars(module).values() if type(held) in _HOLDERS]
    try:
        yield
    finally:
        for held, contents in before:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(contents)


@contextmanager
def _keeping() -> Iterator[None]:
    """Have torch.utils.checkpoint keep activations: what is asked of a trial's graph comes when layers are back.

    Torch has no switch for that. If the names are gone, a model that recomputes by itself cannot be tried.
    """

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    torchs = vars(torch.utils.checkpoint)
    ours = {"_checkpoint_without_reentrant_generator": generator, "CheckpointFunction": Plain}
    before = {name: torchs[name] for name in ours if name in torchs}
    torchs.update({name: ours[name] for name in before})
    try:
        yield
    finally:
        torchs.update(before)


def tensors_of(value: Any) -> list[Tensor]:
    """The floating-point tensors in what a module returned, whatever holds them."""
    return [plain(leaf) for _, leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# --- stand-ins


def _stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """For every parameter and buffer, in fp32 on the CPU.

    Parameters of layers take no memory, as nobody reads them. Others are random, since their present values may well
    hide a dependence: gates and residual branches often begin with zeros.
    """
    of_layers = {id(param) for name in layers_of(module) for param in module.get_submodule(name).parameters()}
    found: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for name, param in module.named_parameters():
            if not param.is_floating_point():
                found[name] = param.detach()
            elif id(param) in of_layers:
                found[name] = torch.rand(()).expand(param.shape).detach().requires_grad_()
            else:
                found[name] = torch.rand(param.shape).add_(0.5).requires_grad_()
    for name, buffer in module.named_buffers():
        owner = module.get_submodule(name.rpartition(".")[0])
        if is_batch_norm(owner) and buffer.is_floating_point():
            found[name] = torch.rand(buffer.shape, generator=torch.Generator().manual_seed(2)).add_(0.5)
        elif buffer.is_meta:
            found[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
        else:
            found[name] = buffer.detach().to("cpu", torch.float32 if buffer.is_floating_point() else None, copy=True)
        # To a norm's statistics torch has no gradient; ours, of a batch norm, has. What is large is a mask or a table.
        if found[name].is_floating_point() and found[name].numel() <= _WIDE:
            found[name].requires_grad_(is_batch_norm(owner) or not isinstance(owner, _NormBase))
    return found


# --- layers that answer


def _that_answers(stock: type[nn.Module]) -> type[nn.Module]:
    """A class with torch's `stock` as its base whose forward is the attribute `answer`."""
    return type(f"_{stock.__name__}Trial", (stock,), {"forward": lambda self, x: self.answer(x)})


_LINEAR, _CONV1D, _EMBEDDING = map(_that_answers, (nn.Linear, nn.Module, nn.Embedding))


_ATTENTION: Final = inspect.signature(nn.MultiheadAttention.forward)


class _AttentionTrial(nn.MultiheadAttention):
    answer: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Reads three inputs; the answer to the first counts. Every key gets the same weight."""
        asked = _ATTENTION.bind(self, *args, **kwargs)
        asked.apply_defaults()
        query, key, value = (asked.arguments[name] for name in ("query", "key", "value"))
        found, *_ = [self.answer(x) for x in (query, key, value)]
        if not asked.arguments["need_weights"]:
            return found, None
        length, keys = (x.shape[-2 if self.batch_first or x.dim() == 2 else 0] for x in (query, key))
        batch = () if query.dim() == 2 else (query.shape[0 if self.batch_first else 1],)
        heads = () if asked.arguments["average_attn_weights"] else (self.num_heads,)
        return found, torch.full((*batch, *heads, length, keys), 1 / keys)


class _BatchNormTrial(_BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        """In evaluation with gradients for the statistics."""
        if self.training or self.running_mean is None or self.running_var is None:
            return super().forward(x)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        y = (x - self.running_mean.view(shape)) / (self.running_var.view(shape) + self.eps).sqrt()
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


_TRIED: Final[Mapping[str, type[nn.Module]]] = {
    "linear": _LINEAR, "conv1d": _CONV1D, "embedding": _EMBEDDING, "attention": _AttentionTrial,
}  # fmt: skip


@contextmanager
def _answered(trial: Trial, answer: Answer) -> Iterator[None]:
    """Layers answer, for a while."""
    for each in trial.answering:
        each.module.__class__ = each.tried
        if each.layer is not None:
            vars(each.module)["answer"] = partial(answer, each.name, each.layer)
    try:
        yield
    finally:
        for each in trial.answering:
            each.module.__class__ = each.own
            vars(each.module).pop("answer", None)


def brief(error: Exception) -> str:
    """Its class, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
