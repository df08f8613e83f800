"""The sharded model is tried as one rank will run it, and held against the trial of the whole model.

Column layers answer with this rank's part of what they answered then; the input of every layer must be this rank's part
of its input then. So whatever lies between the layers has been shown to work on parts: nothing is taken on trust.
Gradients are held against those of the whole model, too (`dependence.GradientSums`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dsprof.words import joined

from ..tensor.layers import Layer
from ..tensor.shape_override import ShapeOverride, override_shapes, plain
from ..tree import leaves
from .blocks import Edges, Stack, on_first_activation, with_edges
from .dependence import GradientSums, Share
from .styles import Role
from .tracer import Trial, brief, run, tensors_of

RTOL: Final = 1e-3
ATOL: Final = 1e-4
"""What may come of computing in fp32 in another order."""


@dataclass(frozen=True)
class Change:
    """An integer attribute of a module that counts what is sharded, such as `num_heads`.

    One of the module's configuration, `config.num_heads`, is changed in a copy, which the module then has for itself.
    """

    module: str
    attribute: str
    before: int
    after: int

    def make(self, module: nn.Module) -> Callable[[], None]:
        """Make it; call the result to take it back."""
        first, _, of_config = self.attribute.partition(".")
        before = getattr(module, first)
        after: Any = self.after
        if of_config:
            after = copy.copy(before)
            setattr(after, of_config, self.after)
        setattr(module, first, after)
        return lambda: setattr(module, first, before)


@dataclass(frozen=True)
class Arrangement:
    """What is done to the model beside sharding its layers."""

    changes: tuple[Change, ...] = ()
    overrides: tuple[tuple[str, ShapeOverride], ...] = ()
    shares: tuple[tuple[str, Share], ...] = ()
    """Parameters and buffers that are sharded like what they are applied to."""

    def within(self, place: str) -> Arrangement:
        """Its changes and overrides, of modules in the one called `place`."""
        return Arrangement(
            tuple(replace(change, module=joined(place, change.module)) for change in self.changes),
            tuple((joined(place, name), override) for name, override in self.overrides),
        )


class Mismatch(Exception):
    """The sharded model does not compute what the whole one does; `region` is where that begins, if it is in one."""

    def __init__(self, region: int | None, what: str) -> None:
        super().__init__(what)
        self.region = region


class OwnDecision(Mismatch):
    """The model's code decides by what it reads of a part, which no arrangement changes."""


def rehearse_all(
    trial: Trial, roles: Mapping[str, Role], arrangement: Arrangement, stack: Stack | None, size: int
) -> None:
    """Run the tried module as each of `size` ranks will; what they compute, and the gradients, are what the whole model
    computes. Raises Mismatch."""
    gradients = GradientSums(trial)
    ends = dict.fromkeys((0, size - 1))  # which most faults show on
    for rank in (*ends, *(rank for rank in range(size) if rank not in ends)):
        rehearse(trial, roles, arrangement, stack, size, rank, gradients)
    gradients.check(Mismatch)


def rehearse(
    trial: Trial,
    roles: Mapping[str, Role],
    arrangement: Arrangement,
    stack: Stack | None,
    size: int,
    rank: int,
    gradients: GradientSums,
) -> None:
    """Run the tried module as `rank` of `size` will: with gradients, which are added to `gradients`, and without, and
    in training, where dropout lets only shapes be compared. Raises Mismatch."""
    modules = trial.modules
    shares = dict(arrangement.shares)

    def part(name: str, x: Tensor) -> Tensor:
        share = shares.get(joined(trial.root, name))
        return x if share is None else mark(share.bands.shard(x.shape, share.dim, size, rank).take(x))

    for grad, training in ((True, False), (False, False), (True, True))[: 3 if trial.trains else 2]:
        reads = Reads()
        sums = gradients if grad and not training else None
        rank_run = _RankRun(trial, roles, stack, size, rank, reads, exact=not training, gradients=sums)
        with (
            torch.set_grad_enabled(grad),
            arranged(modules, arrangement),
            reads,
            with_edges(trial, stack, rank_run),
        ):
            try:
                found = tensors_of(run(trial, rank_run.answer, training=training, part=part))
            except Mismatch:
                raise
            except Decided as error:
                raise OwnDecision(
                    rank_run.region, f"{rank_run.last} is followed by {error}() of an activation"
                ) from error
            except Exception as error:
                raise Mismatch(rank_run.region, f"{rank_run.last} is followed by {brief(error)}") from error
            rank_run.finish(found)


@contextmanager
def arranged(modules: Mapping[str, nn.Module], arrangement: Arrangement) -> Iterator[None]:
    """`arrangement`, for a while; what concerns other modules is passed over."""
    with ExitStack() as undos:
        for change in arrangement.changes:
            if change.module in modules:
                undos.callback(change.make(modules[change.module]))
        for name, override in arrangement.overrides:
            if name in modules:
                undos.callback(override_shapes(modules[name], override))
        yield


class _RankRun(Edges):
    """One run as one rank; activations are sharded along the sequence where `stack` says."""

    def __init__(
        self, trial: Trial, roles: Mapping[str, Role], stack: Stack | None, size: int, rank: int, reads: Reads, *,
        exact: bool, gradients: GradientSums | None,
    ) -> None:  # fmt: skip
        self._exact = exact
        self._gradients = gradients
        self._reads = reads
        self._trial = trial
        self._roles = roles
        self._stack = stack
        self._size, self._rank = size, rank
        self._calls = trial.numbered()
        self._count: Counter[str] = Counter()
        self._along: int | None = None
        """Dimension along which activations are sharded at present, outside of regions."""
        self.last = "its beginning"
        self.region: int | None = None
        """The region that is open, or was last."""

    def answer(self, name: str, layer: Layer, x: Tensor) -> Tensor:
        """What the layer answers on this rank; raises Mismatch if it is not asked what it should be."""
        x, role = plain(x), self._roles[name]
        number = self._count[name]
        call = self._calls.get((name, number))
        if call is None:
            raise Mismatch(self.region, f"{name} is used once more than by the whole model")
        self._count[name] += 1
        in_region = role.style == "row" and role.region is not None
        part = self._features if in_region else self._shard
        if in_region:
            self.region = role.region
        self._compare(x, part(call.read.detach()), f"the input of {name}")
        if self._gradients is not None and (in_region or self._along is not None):
            with self._reads.aside():
                self._gradients.add(call, number, role.region if in_region else None, part, x)
        self.last = name
        if role.style == "column" and role.region is not None:
            self.region = role.region
            assert role.bands is not None
            mine = role.bands.shard((role.layer.outputs,), 0, self._size, self._rank)
            wrote = call.wrote if self._gradients is not None else call.wrote.detach()
            return mark(wrote[..., mine.index()].clone())
        differentiated = self._gradients is not None and self._stack is not None
        return self._given(call.wrote if differentiated else call.wrote.detach())

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Compare what the module returned, unless it is logits that stay sharded."""
        missing = [name for (name, number) in self._calls if number >= self._count[name]]
        if missing:
            raise Mismatch(self.region, f"{missing[0]} is used less often than by the whole model")
        if any(role.style == "column" and role.region is None for role in self._roles.values()):
            return
        whole = self._trial.outputs if self._exact else self._trial.trained
        if len(outputs) != len(whole):
            raise Mismatch(self.region, f"{len(outputs)} outputs instead of {len(whole)}")
        # A pipeline's stage may pass on what is sharded.
        expected_outputs, _ = on_first_activation(self._shard, tuple(whole), {})
        for found, expected in zip(outputs, expected_outputs, strict=True):
            self._compare(found, expected.detach(), "the output")

    def split(self, x: Tensor) -> Tensor:
        assert self._stack is not None
        self._along = self._stack.dim
        return self._given(x)

    arrive = split

    def join(self, x: Tensor) -> Tensor:
        assert self._stack is not None
        whole = self._trial.joined
        assert whole is not None
        self._compare(x, self._shard(whole), f"the output of {self._stack.last}")
        self._along = None
        return whole.clone()

    def _compare(self, found: Tensor, expected: Tensor, what: str) -> None:
        if found.shape != expected.shape:
            raise Mismatch(self.region, f"{what} has shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        with self._reads.aside():
            alike = not self._exact or torch.allclose(found.float(), expected.float(), RTOL, ATOL, equal_nan=True)
        if not alike:
            raise Mismatch(self.region, f"{what} is not what the whole model computes")

    def _given(self, x: Tensor) -> Tensor:
        """`x` as code between regions gets it."""
        shard = self._shard(x).clone()
        return shard if self._along is None or x.dim() <= self._along else mark(shard)

    def _features(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self._size
        return x[..., self._rank * width : (self._rank + 1) * width]

    def _shard(self, x: Tensor) -> Tensor:
        if self._along is None or x.dim() <= self._along:
            return x
        length = x.shape[self._along]
        if length % self._size:
            what = f"sequence_parallel: a sequence of {length} does not divide by {self._size} ranks; pad it"
            raise Mismatch(None, what)
        return x.narrow(self._along, self._rank * (length // self._size), length // self._size)


_READS: Final = frozenset({
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "item", "tolist",
    "numpy", "is_nonzero", "equal", "allclose",
})  # fmt: skip
"""Functions that give Python a value of a tensor."""

_CHECKS: Final = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf"})
"""Asked of activations to find faults, and to clamp each by itself; a part may be asked as well."""


class Decided(Exception):
    """Python has asked for a value of what is one rank's part; the text is the function that did."""


def mark(part: Tensor) -> Tensor:
    """Say of `part` that other ranks have other values."""
    part.of_one_rank = True  # type: ignore[attr-defined]
    return part


class Reads(TorchFunctionMode):
    """While it is on, what is computed from marked tensors is marked. Raises Decided where Python is given a value, and
    ValueError where attention is asked for no heads."""

    def __init__(self) -> None:
        super().__init__()
        self._aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done here is not the model's."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            _refuse_no_heads(args, kwargs)
        if self._aside or not _is_marked((args, kwargs)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise Decided(name.strip("_"))
        result = func(*args, **kwargs)
        if name not in _CHECKS:
            for x in _tensors(result):
                mark(x)
        if name == "__setitem__":
            mark(args[0])
        return result


def _refuse_no_heads(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """An arrangement that leaves a rank no key heads fails as any other wrong one does. torch 2.11 divides by their
    number in grouped-query attention, which would end the process."""
    tensors = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
    if any(x.numel() == 0 for x in tensors):
        raise ValueError("attention is asked for no heads")


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def _is_marked(value: Any) -> bool:
    return any(getattr(x, "of_one_rank", False) for x in _tensors(value))
