"""`flops_profiler`: floating-point operations, parameters and time of each module, as DeepSpeed's prints them.

Counting slows down every operator, so what is timed is not what is counted: the first micro-batch of the step before
`profile_step` is counted, that of `profile_step` itself is timed. Operations of backward are counted too, and so
include what is recomputed. Operations are those of this rank: of its layers, where they are divided, and of its part
of each, where they are sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..config.debugging import FlopsProfilerConfig
from ..hooks import Span
from .breakdown import Timer, phase_of

T = TypeVar("T")

DONE: Final = -1


# --- what is measured


@dataclass(frozen=True)
class ModuleCost:
    """One module, with all that it contains, in one forward."""

    name: str
    """As in `named_modules`; the model itself has none."""
    kind: str
    params: int
    flops: int
    seconds: float

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class Profile:
    """A step of one rank, first micro-batch."""

    step: int
    modules: tuple[ModuleCost, ...]
    """Those that ran, in the model's order and the model first."""
    backward_flops: int
    backward_seconds: float
    step_seconds: float
    """Of the optimizer's step; 0 if there was none."""
    elements: tuple[int, int]
    """Elements of the input that was counted, and of the one that was timed."""


class FlopsProfiler:
    """Profiles one step by listening to the engine's phases, and prints or writes the table at its end."""

    def __init__(
        self,
        model: nn.Module,
        section: FlopsProfilerConfig,
        timer: Timer,
        show: Callable[[str], None] = print,
    ) -> None:
        self._model = model
        self._section = section
        self._timer = timer
        self._show = show
        self._open: ExitStack | None = None
        self._first: int | None = None
        """Number of the first micro-batch of the step under way."""
        self._counted: int | None = None
        """The step whose operations are counted; DONE when it is over."""
        self._flops: Counter[str] = Counter()
        """Phase -> operations."""
        self._spent: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        """Phase -> stamps of its beginnings and ends."""
        self._counts: list[tuple[nn.Module, int, int]] = []
        self._times: list[tuple[nn.Module, Any, Any]] = []
        self._elements = [0, 0]

    def begin(self, span: Span) -> None:
        phase = self._phase(span)
        if phase is None or self._open is not None:
            return
        self._open = ExitStack()
        if phase != "step" and self._counted in (None, span.step):
            self._counted = span.step
            self._open.enter_context(self._counting(phase))
        if span.step == self._section.profile_step:
            self._open.enter_context(self._timing(phase))

    def end(self, span: Span) -> None:
        phase = self._phase(span)
        if self._open is None or phase is None:
            return
        self._open.close()
        self._open = None
        if phase == "step":
            self._first = None
            self._counted = DONE if self._counted == span.step else self._counted
        if phase == "step" and span.step == self._section.profile_step:
            self._write(render(self._profile(), self._section))
            self._counts, self._times = [], []
            self._spent.clear()

    def _phase(self, span: Span) -> str | None:
        """The phase that `span` is, if it is looked at: all of the first micro-batch, and the step.

        A micro-batch has several forwards where a rank has several stages of a pipeline, or the script runs the model
        more than once; and several backwards where gradients of inputs and of weights are apart.
        """
        phase = phase_of(span)
        if phase in (None, "recompute") or not 0 <= self._section.profile_step - span.step <= 1:
            return None
        if phase == "forward" and self._first is None:
            self._first = span.microbatch
        return phase if phase == "step" or span.microbatch == self._first else None

    @contextmanager
    def _counting(self, phase: str) -> Iterator[None]:
        with flop_counter() as counter:
            with self._noting(phase, counter.get_total_flops, self._counts, 0):
                yield
            self._flops[phase] += counter.get_total_flops()

    @contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        start = self._timer.stamp()
        with self._noting(phase, self._timer.stamp, self._times, 1):
            yield
        self._spent[phase].append((start, self._timer.stamp()))

    @contextmanager
    def _noting(
        self, phase: str, read: Callable[[], T], readings: list[tuple[nn.Module, T, T]], place: int
    ) -> Iterator[None]:
        """In a forward, note what `read` says as each module begins and ends, and the elements of the model's input."""
        begun: list[T] = []

        def before(module: nn.Module, args: Any) -> None:
            begun.append(read())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            readings.append((module, begun.pop(), read()))

        def note_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = pytree.tree_leaves((args, kwargs))
            self._elements[place] += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

        with ExitStack() as hooks:
            if phase == "forward":
                for module in self._model.modules():
                    hooks.callback(module.register_forward_pre_hook(before).remove)
                    hooks.callback(module.register_forward_hook(after, always_call=True).remove)
                hooks.callback(self._model.register_forward_pre_hook(note_input, with_kwargs=True).remove)
            yield

    def _profile(self) -> Profile:
        flops: defaultdict[nn.Module, int] = defaultdict(int)
        for module, before, after in self._counts:
            flops[module] += after - before
        seconds: defaultdict[nn.Module, float] = defaultdict(float)
        for module, start, end in self._times:
            seconds[module] += self._timer.seconds(start, end)
        modules = tuple(
            ModuleCost(
                name, type(module).__name__, sum(p.numel() for p in module.parameters()), flops[module], seconds[module]
            )
            for name, module in self._model.named_modules()
            if module in seconds
        )
        spent = {
            name: sum(self._timer.seconds(*stamps) for stamps in self._spent[name]) for name in ("backward", "step")
        }
        return Profile(
            self._section.profile_step, modules, self._flops["backward"], spent["backward"], spent["step"],
            (self._elements[0], self._elements[1]),
        )  # fmt: skip

    def _write(self, text: str) -> None:
        if self._section.output_file is None:
            self._show(text)
            return
        path = Path(self._section.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


# --- the table


def render(profile: Profile, section: FlopsProfilerConfig) -> str:
    """The report, as text."""
    if not profile.modules:
        return f"flops profiler: no forward of the model was seen in step {profile.step}"
    lines = ["-" * 26 + " flops profiler " + "-" * 26, *_totals(profile)]
    lines += [
        "",
        f"Top {section.top_modules} modules in terms of params, flops or fwd latency at different model depths:",
    ]
    lines += _aggregated(profile.modules, section.module_depth, section.top_modules)
    if section.detailed:
        lines += ["", *_detailed(profile.modules)]
    return "\n".join(lines)


def _totals(profile: Profile) -> Iterator[str]:
    model = profile.modules[0]
    both = model.flops + profile.backward_flops
    elapsed = model.seconds + profile.backward_seconds + profile.step_seconds
    yield f"Profile of step {profile.step} (steps before it: {profile.step}), first micro-batch, this rank:"
    if profile.elements[0] != profile.elements[1]:
        yield (
            f"  flops are those of step {profile.step - 1}, whose input had {profile.elements[0]:,} elements; this "
            f"one's has {profile.elements[1]:,}"
        )
    rows = {
        "params": _scaled(model.params),
        "fwd flops": _scaled(model.flops),
        "fwd latency": _duration(model.seconds),
        "fwd FLOPS = fwd flops / fwd latency": _rate(model.flops, model.seconds),
        "bwd flops, recomputation included": _scaled(profile.backward_flops),
        "bwd latency": _duration(profile.backward_seconds),
        "bwd FLOPS = bwd flops / bwd latency": _rate(profile.backward_flops, profile.backward_seconds),
        "step latency": _duration(profile.step_seconds),
        "iter latency = fwd + bwd + step latency": _duration(elapsed),
        "FLOPS = (fwd + bwd flops) / iter latency": _rate(both, elapsed),
    }
    for label, value in rows.items():
        yield f"  {label + ':':<45}{value}"


def _aggregated(modules: tuple[ModuleCost, ...], module_depth: int, top: int) -> Iterator[str]:
    deepest = max(module.depth for module in modules)
    for depth in range((deepest if module_depth < 0 else min(module_depth, deepest)) + 1):
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for module in modules:
            if module.depth == depth:
                for column, value in enumerate((module.params, module.flops, module.seconds)):
                    sums[module.kind][column] += value
        yield f"depth {depth}:"
        for column, (label, form) in enumerate((("params", _scaled), ("flops", _scaled), ("fwd latency", _duration))):
            best = sorted(sums, key=lambda kind: -sums[kind][column])[:top]
            yield f"  {label:<12}" + ", ".join(f"{kind} {form(sums[kind][column])}" for kind in best)


def _detailed(modules: tuple[ModuleCost, ...]) -> Iterator[str]:
    model = modules[0]
    yield f"{'module':<44}{'params':>10}{'':>8}{'fwd flops':>11}{'':>8}{'latency':>11}{'':>8}{'FLOPS':>11}"
    for module in modules:
        label = "  " * module.depth + f"{module.name.rpartition('.')[2]} ({module.kind})".lstrip()
        yield (
            f"{label:<44}{_scaled(module.params):>10}{_share(module.params, model.params):>8}"
            f"{_scaled(module.flops):>11}{_share(module.flops, model.flops):>8}"
            f"{_duration(module.seconds):>11}{_share(module.seconds, model.seconds):>8}"
            f"{_rate(module.flops, module.seconds):>11}"
        )


def _scaled(value: float) -> str:
    """To four figures: `128`, `1.5 K`, `12.34 G`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _rate(flops: float, seconds: float) -> str:
    return _scaled(flops / seconds) if seconds else "-"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


# --- operations of operators: torch's own formulas, and attention on CPU, for which torch has none

Shape = Sequence[int]
"""[batch, heads, length, width]"""


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values. A causal mask saves nothing, as in torch's formulas for GPUs."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """The scores once more; gradients of queries and keys; of values and of the scores."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


_ON_CPU: Final[dict[Any, Callable[..., int]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def flop_counter() -> FlopCounterMode:
    """Counts the operations of what runs inside it as a context; a multiplication and an addition are two."""
    return FlopCounterMode(display=False, custom_mapping=_ON_CPU)


def has_formula(operator: Any) -> bool:
    """Whether it is one whose operations are counted: a matrix product, a convolution, attention."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    return packet in flop_counter().flop_registry
