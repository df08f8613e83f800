"""The vocabulary of a pipeline whose first stage looks up tokens in a weight that its last one computes logits with.

Both stages shard it alike, by rows, so each rank sums the gradient of its rows with the rank of the other stage that
has the same (`zero.shared_params`). The planner sees one stage at a time, so what is tied is settled first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..pipe.layers import PipelineLayer
from ..pipe.module import PipelineModule
from ..tensor.collectives import VocabularyCrossEntropy, copy, join
from ..tensor.layers import layer_of
from ..tensor.sharding import even_shard, shard_of
from .apply import ElsewhereError, parallelize, shard_vocabulary
from .blocks import of_first
from .plan import TensorPlan
from .styles import PlanError, Role, Wanted, wanted_styles
from .tracer import brief
from .verify import ATOL, RTOL


@dataclass(frozen=True)
class _Offer:
    """What a rank says of a tied weight that it has."""

    shape: tuple[int, ...]
    looked_up: bool
    """Whether tokens are looked up in it here."""
    against: str
    """Why it cannot be sharded by rows; empty if it can."""


@dataclass(frozen=True)
class _Tied:
    """A tied weight that this rank has."""

    name: str
    """In the whole model."""
    param: nn.Parameter
    owners: dict[str, nn.Module]
    """The modules that have it, by their names in the pipeline."""
    functions: list[PipelineLayer]
    """Layers here that are functions (`forward_fn`) of one of these, or of what it is in."""
    called: bool
    """Whether the owners are called themselves, too."""


def parallelize_pipeline(
    model: PipelineModule,
    comm: Comm,
    plan: Mapping[str, str] | None,
    *,
    sequence_parallel: bool = False,
    example: Any = None,
    everyone: Comm,
) -> tuple[TensorPlan, list[str]]:
    """`parallelize`, with what is tied across layers of the pipeline sharded by rows, if it is a vocabulary and all
    stages can do that alike; otherwise it stays whole. Also lines that say which. On all ranks of `everyone`."""
    tied = _tied_here(model)
    styles = _styles(model, plan)
    against = _agreed({each.name: _offer(each, comm.size, styles) for each in tied}, everyone)
    head = _head(model)
    while True:
        sharded = [each for each in tied if not against[each.name]]
        settled = _settled(tied, against, styles)
        if head is not None and styles.get(head) == "auto" and settled.get(head) != "whole":
            settled[head] = "column"
        wanted: Mapping[str, str] | None = plan
        if settled:
            wanted = {**settled, **({"*": "auto"} if plan is None else plan)}
        try:
            with _standing_in(sharded):
                made = parallelize(
                    model, comm, wanted, sequence_parallel=sequence_parallel, example=example, everyone=everyone
                )
            break
        except PlanError as error:
            if all(against.values()):
                raise
            cause = _cause(error, everyone)
            against = {name: why or cause for name, why in against.items()}
    for each in sharded:
        _shard_functions(model, each, comm)
    for role in made.roles:
        if role.module == head and role.style == "column":
            _of_parts(model, comm, role.layer.outputs)
    return made, [
        f"  {name}, tied over the pipeline: {f'whole, since {why}' if why else 'sharded by rows wherever it is used'}"
        for name, why in against.items()
    ]  # fmt: skip


# --- what could be sharded


def _tied_here(model: PipelineModule) -> list[_Tied]:
    """The weights here that several pipeline ranks have, or that a layer is a function of."""
    here = [layer for layer in model.pipeline_layers if layer.key is not None and isinstance(layer.built, nn.Module)]
    functions = [layer for layer in here if layer.forward_fn is not None]
    called = {layer.key for layer in here if layer.forward_fn is None}
    shared = {param for tie in model.ties() for param in tie.params}
    shared.update(param for use in functions for param in _module(use).parameters())
    found = []
    for param, name in model.names().items():
        if param not in shared:
            continue
        owners = {path: module for path, module in model.named_modules()
                  if any(param is other for other in module.parameters(recurse=False))}  # fmt: skip
        uses = [use for use in functions if any(param is other for other in _module(use).parameters())]
        found.append(_Tied(name, param, owners, uses, not uses or any(use.key in called for use in uses)))
    return found


def _module(use: PipelineLayer) -> nn.Module:
    """What a layer here is a function of."""
    assert isinstance(use.built, nn.Module)
    return use.built


def _head(model: PipelineModule) -> str | None:
    """The linear layer here whose output is nothing but what a VocabularyCrossEntropy gets, if there is one."""
    if not model.placement.is_last() or not isinstance(model.loss_fn, VocabularyCrossEntropy):
        return None
    last = model.pipeline_layers[-1]
    layer = layer_of(last.built) if isinstance(last.built, nn.Module) and last.forward_fn is None else None
    return last.path if layer is not None and layer.kind == "linear" else None


def _of_parts(model: PipelineModule, comm: Comm, vocabulary: int) -> None:
    assert isinstance(model.loss_fn, VocabularyCrossEntropy)
    model.loss_fn.shard(comm, vocabulary)


def _styles(model: PipelineModule, plan: Mapping[str, str] | None) -> dict[str, Wanted]:
    try:
        return wanted_styles(model, {"*": "auto"} if plan is None else plan)
    except PlanError:
        return {}  # which is raised when the plan is carried out


def _offer(tied: _Tied, size: int, styles: Mapping[str, Wanted]) -> _Offer:
    looked_up = tied.called and any(isinstance(module, nn.Embedding) for module in tied.owners.values())
    against = next((why for path, module in tied.owners.items() if (why := _unfit(path, module, tied, styles))), "")
    for use in tied.functions:
        against = against or _not_by_rows(use, tied.param, size)
    return _Offer(tuple(tied.param.shape), looked_up, against)


def _unfit(path: str, module: nn.Module, tied: _Tied, styles: Mapping[str, Wanted]) -> str:
    layer = layer_of(module)
    if layer is None or layer.kind not in ("linear", "embedding") or module._parameters.get("weight") is not tied.param:
        return f"{path} is neither an embedding nor a linear layer that has it as its weight"
    if styles.get(path, "whole") == "whole":
        return f"the plan leaves {path} whole"
    return ""


def _not_by_rows(use: PipelineLayer, param: nn.Parameter, size: int) -> str:
    """Why the layer `use` cannot be computed by each rank from its rows of `param`; empty if it can.

    It is tried on random numbers: with some of the rows it must compute those features of what it computes with all,
    and with no other parameter.
    """
    what = f"layer {use.name} is a function of {use.path} that does not compute a feature of each row"
    called = _Called(use)
    rows, width = param.shape
    parameters = dict(called.named_parameters())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        others = {key: torch.rand(x.shape, requires_grad=True) for key, x in parameters.items() if x is not param}
        name = next(key for key in parameters if key not in others)
        x, weight = torch.rand(2, 3, width), torch.rand(rows, width)
        try:
            whole = functional_call(called, {name: weight, **others}, (x,))
            if not isinstance(whole, Tensor) or whole.shape[-1] != rows:
                return what
            if whole.requires_grad:
                return f"layer {use.name}, a function of {use.path}, uses other parameters of it too"
            for rank in (0, size - 1):
                shard = even_shard((rows, width), 0, size, rank)
                part = functional_call(called, {name: shard.take(weight), **others}, (x,))
                expected = even_shard(whole.shape, -1 % whole.dim(), size, rank).take(whole)
                if part.shape != expected.shape or not torch.allclose(part, expected, RTOL, ATOL):
                    return what
        except Exception as error:
            return f"{what}: {brief(error)}"
    return ""


class _Called(nn.Module):
    """What a layer is a function of, so that it can be called with other parameters."""

    def __init__(self, use: PipelineLayer) -> None:
        super().__init__()
        self.module = _module(use)
        self._function = use.function(self.module)

    def forward(self, x: Tensor) -> Any:
        return self._function(x)


def _agreed(offers: Mapping[str, _Offer], everyone: Comm) -> dict[str, str]:
    """Name of each tied weight -> why it stays whole, or nothing. On all ranks of `everyone` the same."""
    made = gather_objects(offers, everyone)
    found: dict[str, str] = {}
    for name in sorted({name for rank in made for name in rank}):
        said = [rank[name] for rank in made if name in rank]
        why = next((offer.against for offer in said if offer.against), "")
        if not why and len({offer.shape for offer in said}) > 1:
            why = f"its shape differs: {sorted({offer.shape for offer in said})}"
        if not why and not any(offer.looked_up for offer in said):
            why = "no layer looks up tokens in it"
        found[name] = why
    return found


def _cause(error: PlanError, everyone: Comm) -> str:
    """What went wrong, on whichever rank that was."""
    own = None if isinstance(error, ElsewhereError) else str(error)
    return next(text for text in gather_objects(own, everyone) if text is not None)


# --- carrying it out


def _settled(tied: list[_Tied], against: Mapping[str, str], styles: Mapping[str, Wanted]) -> dict[str, str]:
    """What the layers are to be of which the plan leaves it open."""
    found: dict[str, str] = {}
    for each in tied:
        for path, module in each.owners.items():
            if layer_of(module) is None or (styles.get(path) != "auto" and each.called):
                continue
            style = "vocab" if isinstance(module, nn.Embedding) else "column_gather"
            found[path] = style if each.called and not against[each.name] else "whole"
    return found


@contextmanager
def _standing_in(sharded: list[_Tied]) -> Iterator[None]:
    """While the planner tries the model, layers that are functions of what is sharded do not read it, and write
    features that depend on all of their input."""
    uses = [(use, each.param.shape) for each in sharded for use in each.functions]
    try:
        for use, (rows, width) in uses:
            inner, outer = (torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5 for n in (width, rows))
            use.call = functools.partial(_mixed, inner, outer)
        yield
    finally:
        for use, _ in uses:
            use.call = None


def _mixed(inner: Tensor, outer: Tensor, x: Tensor) -> Tensor:
    return (x * inner).sum(-1, keepdim=True) * outer


def _shard_functions(model: PipelineModule, tied: _Tied, comm: Comm) -> None:
    """Have the layers that are functions of `tied`, whose rows are sharded, write all features on every rank."""
    if comm.size == 1:
        return
    if not tied.called:
        for path, module in tied.owners.items():
            layer = layer_of(module)
            assert layer is not None
            shard_vocabulary(module, Role(path, layer, "vocab", "tied over the pipeline"), comm)
    shard = shard_of(tied.param)
    assert shard is not None
    for use in tied.functions:
        stays_sharded = use is model.pipeline_layers[-1] and isinstance(model.loss_fn, VocabularyCrossEntropy)
        use.call = _by_rows(use, shard.shape[0], comm, joined=not stays_sharded)
        if stays_sharded:
            _of_parts(model, comm, shard.shape[0])


def _by_rows(use: PipelineLayer, rows: int, comm: Comm, *, joined: bool) -> Callable[[Any], Any]:
    function = use.function(_module(use))  # as it is without `call`

    def call(x: Any) -> Tensor:
        y: Tensor = function(of_first(lambda x: copy(x, comm, use.path), x))
        if not joined:
            return y
        y = join(y, comm, -1, use.path)
        return y[..., :rows].contiguous() if y.shape[-1] > rows else y

    return call
