"""Which layer is sharded how, from what depends on what.

A layer is a row layer if its input falls into as many independent parts as there are ranks, each made of a part of what
the layers before wrote; these are its column layers. They must be read by row layers alone, with the same parts. Such a
set is a sharded region: nothing inside it needs another rank until the row layers sum their outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import nn

from ..tensor.layers import is_batch_norm, layers_of
from .dependence import Bands, Flow, RowSharding, Share, Source, independent_parts, row_sharding
from .styles import PlanError, Role, Roles, Style, Wanted, leave_whole, listed
from .tracer import Call, Trial

T = TypeVar("T")

OUTPUT: Final = "the output"
"""Reader of what a tried module returns."""


@dataclass(frozen=True)
class _Use:
    call: Call
    flow: Flow
    sources: tuple[Source, ...]

    def layers(self) -> list[Source]:
        return [source for source in self.sources if source.kind == "layer"]


def decide(model: nn.Module, trials: Sequence[Trial], wanted: Mapping[str, Wanted], size: int) -> Roles:
    """The role of every layer of `model`. Raises PlanError for what cannot be carried out as wanted."""
    return _Decision(model, trials, wanted, size).made()


class _Decision:
    def __init__(self, model: nn.Module, trials: Sequence[Trial], wanted: Mapping[str, Wanted], size: int) -> None:
        self._size = size
        self._wanted = wanted
        self._layers = layers_of(model)
        self._modules = dict(model.named_modules())
        self._uses: dict[str, list[_Use]] = {}
        self._readers: dict[str, set[str]] = {name: set() for name in self._layers}
        self._param_readers: dict[str, set[str]] = {}
        self._on_inputs = {call.module for trial in trials for call in trial.calls if _reads_input(trial, call)}
        for trial in trials:
            flow = Flow(trial)
            for call in trial.calls:
                sources = tuple(flow.sources(call.read)) if call.read.is_floating_point() else ()
                self._uses.setdefault(call.module, []).append(_Use(call, flow, sources))
                self._note(call.module, sources)
            for output in trial.outputs:
                self._note(OUTPUT, flow.sources(output))
        self._owners = _owners(model, self._layers)
        params = self._params = dict(model.named_parameters(remove_duplicate=False))
        self._unfit = {name: why for name in self._layers if (why := _unfit(self._modules[name]))}
        """Layer -> why it has to be whole."""
        for name in self._param_readers:
            for owner in self._owners.get(id(params.get(name)), ()):
                self._unfit[owner] = "its weight is used outside its forward"
        self._tied = {
            name: tuple({owner: 1 for param in self._modules[name].parameters()
                         for owner in self._owners[id(param)] if owner != name})
            for name in self._layers
        }  # fmt: skip
        """Layer -> those that have a parameter with it in common."""
        self._roles: dict[str, Role] = {}
        self._shares: dict[str, Share] = {}
        self._test = functools.cache(self._tested)
        self._sizes: dict[str, tuple[list[Source], PlanError]] = {}
        """Row layer -> the layers that it reads, and the error that it is, if all of them are left without a region."""

    def _note(self, reader: str, sources: Iterable[Source]) -> None:
        for source in sources:
            if source.kind == "layer":
                self._readers[source.name].add(reader)
            elif source.kind != "input":
                self._param_readers.setdefault(source.name, set()).add(reader)

    def made(self) -> Roles:
        for name, why in self._unfit.items():
            if self._wanted[name] not in ("auto", "whole"):
                raise PlanError(f"tensor parallel plan: {name} cannot be sharded: {why}; write whole")
        found = [region for name in self._uses if self._is_linear(name) and (region := self._region(name))]
        # The adapters of a layer could be a region, too, and would keep the layer from being in one.
        for number, region in enumerate(sorted(found, key=self._elements, reverse=True)):
            self._enter(region, number)
        for name, (sources, error) in self._sizes.items():
            if not any(layer in self._roles for layer in (name, *(source.name for source in sources))):
                raise error
        self._vocabularies()
        for name in self._layers:
            if name not in self._roles:
                self._alone(name)
        order = {name: self._roles[name] for name in self._layers}
        return Roles(order, self._partial(), self._shares)

    # --- regions

    def _may(self, name: str, style: Style) -> bool:
        free = name not in self._roles and name not in self._unfit and not self._tied[name]
        return free and self._is_linear(name) and self._wanted[name] in ("auto", style)

    def _is_linear(self, name: str) -> bool:
        return self._layers[name].kind in ("linear", "conv1d")

    def _region(self, first: str) -> dict[str, RowSharding] | None:
        """The row layers of the region that has `first` as one, with what is to be sharded for each; None if there is
        no such region."""
        if not self._may(first, "row"):
            return None
        rows, columns, todo = dict[str, RowSharding](), dict[str, Bands](), [first]
        while todo:
            row = todo.pop()
            sharding = self._test(row)
            if isinstance(sharding, str):
                return None
            rows[row] = sharding
            for column, bands in sharding.columns.items():
                if columns.setdefault(column, bands) != bands or not self._may(column, "column"):
                    return None
                for reader in self._readers[column]:
                    if reader == OUTPUT or not self._may(reader, "row"):
                        return None
                    if reader not in rows and reader not in todo:
                        todo.append(reader)
        shares = _agreed([each.shares for each in rows.values()])
        alone = shares is not None and all(self._param_readers[name] <= rows.keys() for name in shares)
        return rows if alone and not rows.keys() & columns.keys() else None

    def _elements(self, region: Mapping[str, RowSharding]) -> int:
        members = {*region, *(column for each in region.values() for column in each.columns)}
        return sum(self._layers[name].inputs * self._layers[name].outputs for name in members)

    def _enter(self, region: Mapping[str, RowSharding], number: int) -> None:
        """Give the layers of `region` their roles, unless one of them has got another."""
        columns = {column: bands for each in region.values() for column, bands in each.columns.items()}
        if any(name in self._roles for name in (*region, *columns)):
            return
        for column, bands in columns.items():
            share = f", in bands of {', '.join(map(str, bands.sizes))}" if len(bands.sizes) > 1 else ""
            share += f", each part on {bands.copies} ranks" if bands.copies > 1 else ""
            given = self._uses[column][0].call.given
            shares = next(name for name in columns if self._uses[name][0].call.given is given)
            why = f"read by {listed(region)}{share}"
            self._roles[column] = Role(column, self._layers[column], "column", why, bands, number, shares=shares)
        heads = self._heads(next(iter(region)))
        for row, sharding in region.items():
            why = f"reads {listed(columns)} in {heads} independent parts"
            self._roles[row] = Role(row, self._layers[row], "row", why, None, number, heads)
            self._shares.update(sharding.shares)

    def _tested(self, name: str) -> RowSharding | str:
        """What is to be sharded for `name` to be a row layer, or why it cannot be one."""
        found: list[RowSharding] = []
        for use in self._uses.get(name, ()):
            sources = use.layers()
            if not sources:
                return "no layer that is sharded wrote its input"
            for source in use.sources:
                if source.kind == "input" or (source.kind == "layer" and not self._shardable(source.name)):
                    return f"its input depends on {source.name or 'the input'}, which is not sharded"
            needed = self._sharding(use, self._size)
            if needed is None:
                if self._would_be_sharded(name, sources):
                    self._refuse_size(name, use)
                return f"its input mixes what {listed({source.name for source in sources})} wrote"
            for param, share in needed.shares.items():
                if why := self._unfit_share(param, share):
                    return f"{param} would have to be sharded with its input, and {why}"
            found.append(needed)
        if not found:
            return "it was not used when the model was tried"
        columns, shares = _agreed([use.columns for use in found]), _agreed([use.shares for use in found])
        if columns is None or shares is None:
            return "its uses need different parts of what it reads"
        return RowSharding(columns, shares)

    def _unfit_share(self, name: str, share: Share) -> str:
        """Why a parameter or buffer cannot be sharded."""
        if share.bands.copies > 1:
            return f"{share.bands.copies} ranks need the same part of it"
        owner, attribute = self._modules[name.rpartition(".")[0]], name.rpartition(".")[2]
        saved = attribute in owner._buffers and attribute not in owner._non_persistent_buffers_set
        return "is a buffer that is saved" if saved and not is_batch_norm(owner) else ""

    def _sharding(self, use: _Use, size: int) -> RowSharding | None:
        found = row_sharding(use.flow, use.call, use.sources, size)
        if found is None:
            return None
        # Key-value heads may be copied to every rank; what is as wide as the queries is mixed, if every rank needs it.
        copied = [layer for layer, bands in found.columns.items() if bands.copies == size]
        mixed = any(self._layers[layer].outputs >= use.call.layer.inputs for layer in copied)
        return None if mixed or len(copied) == len(found.columns) else found

    def _shardable(self, name: str) -> bool:
        return self._is_linear(name) and name not in self._unfit and not self._tied[name]

    def _would_be_sharded(self, name: str, sources: Sequence[Source]) -> bool:
        """Whether `name` and what it reads would be a region, if only its heads divided."""
        return self._may(name, "row") and all(
            self._may(source.name, "column") and OUTPUT not in self._readers[source.name] for source in sources
        )

    def _heads(self, name: str) -> int:
        use = self._uses[name][0]
        return independent_parts(use.flow, use.call, use.layers())

    def _refuse_size(self, name: str, use: _Use) -> None:
        """Note it as an error if the input of `name` could be shared out over another number of ranks."""
        heads, features = independent_parts(use.flow, use.call, use.layers()), use.call.layer.inputs
        works = [n for n in range(2, min(heads, 64) + 1) if heads % n == 0 and self._sharding(use, n) is not None]
        if not works:
            return
        what = f"{heads} attention heads" if heads < features else f"{features} features"
        written = f"reads {what} of {listed({source.name for source in use.layers()})}"
        if heads % self._size == 0:
            written += ", some of whose keys and values would be needed on several ranks"
        self._sizes[name] = use.layers(), PlanError(self._not_shared_out(name, written, works))

    def _not_shared_out(self, name: str, what: str, works: Sequence[int]) -> str:
        return (
            f"tensor parallelism over {self._size} ranks: {name} {what}, which cannot be shared out over {self._size}; "
            f"sizes that work: {', '.join(map(str, works)) or 'none'}. Choose one, or "
            f"{leave_whole(name.rpartition('.')[0] or name)}"
        )

    # --- the others

    def _vocabularies(self) -> None:
        """Token embeddings and the heads that belong to them."""
        tables = set()
        for name, layer in self._layers.items():
            if layer.kind != "embedding" or name in self._unfit or name not in self._uses:
                continue
            tied = self._tied[name]
            follows = next((n for n in tied if self._wanted[n] in ("column_gather", "column")), None)
            auto = self._wanted[name] == "auto" and (name in self._on_inputs or tied)
            if self._wanted[name] in ("vocab", "row", "row_split") or auto or follows is not None:
                why = f"tied to {tied[0]}" if tied else "looks up the model's input"
                self._roles[name] = self._role(name, "vocab", why)
                tables.add(layer.inputs)
        for name, layer in self._layers.items():
            if not self._is_linear(name) or name in self._roles or name in self._unfit:
                continue
            table = next((n for n in self._tied[name] if n in self._roles and self._roles[n].style == "vocab"), None)
            # On a pipeline's last stage the embedding is elsewhere; then there is but the width to go by.
            is_head = layer.outputs in tables or (not tables and layer.outputs >= 4 * layer.inputs)
            if table is not None and self._wanted[name] != "column":
                self._roles[name] = self._role(name, "column_gather", f"tied to {table}")
            elif is_head and self._wanted[name] == "auto" and self._readers[name] == {OUTPUT}:
                self._roles[name] = self._role(name, "column_gather", "writes the logits of the vocabulary")

    def _alone(self, name: str) -> None:
        """A layer that belongs to no region: what it is wanted to be, if it can."""
        layer, wanted = self._layers[name], self._wanted[name]
        if layer.kind == "attention" and wanted == "auto" and name in self._uses and not self._tied[name]:
            wanted = "heads"
        if wanted == "auto" or wanted == "whole":
            self._roles[name] = self._role(name, "whole", "as planned" if wanted == "whole" else self._why_whole(name))
            return
        if name not in self._uses:
            raise PlanError(f"tensor parallel plan: {name} is {wanted}, but it was not used when the model was tried")
        kind = {"vocab": "embedding", "heads": "attention"}.get(wanted, "linear")
        if kind != layer.kind.replace("conv1d", "linear"):
            what = {"embedding": "an embedding", "attention": "an attention"}.get(layer.kind, "a linear layer")
            raise PlanError(f"tensor parallel plan: {name} is {wanted}, which is not for {what}")
        if wanted == "heads":
            self._roles[name] = self._role(name, "heads", self._why_heads(name))
            return
        if wanted == "row_split" and layer.inputs % self._size:
            raise PlanError(
                f"tensor parallel plan: {name} has {layer.inputs} inputs, which do not divide by {self._size}"
            )
        if wanted == "row":
            test = self._test(name)
            bad = (
                test
                if isinstance(test, str)
                else f"{listed(test.columns)} would have to be column, and read by row layers only"
            )
            raise PlanError(
                f"tensor parallel plan: {name} is row, but {bad}; where its input is whole, write row_split"
            )
        if wanted == "column" and self._readers[name] != {OUTPUT}:
            reader = next(iter(sorted(self._readers[name])), "nothing")
            raise PlanError(
                f"tensor parallel plan: {name} is column, but {reader} reads its output whole; make that row, or write "
                "column_gather"
            )
        self._roles[name] = self._role(name, wanted, "as planned")

    def _why_heads(self, name: str) -> str:
        heads = self._modules[name].num_heads
        assert isinstance(heads, int)
        if heads % self._size:
            works = [n for n in range(2, heads + 1) if heads % n == 0]
            raise PlanError(self._not_shared_out(name, f"has {heads} attention heads", works))
        return f"has {heads} heads"

    def _why_whole(self, name: str) -> str:
        if name in self._unfit:
            return self._unfit[name]
        if name not in self._uses:
            return "not used when the model was tried"
        if self._layers[name].kind == "embedding":
            return "looks up what the model computes"
        readers = sorted(self._readers[name])
        if readers == [OUTPUT]:
            return "writes the output"
        return (
            f"{listed(readers)} read{'s' if len(readers) == 1 else ''} its output whole" if readers else "is not read"
        )

    def _role(self, name: str, style: Style, why: str) -> Role:
        return Role(name, self._layers[name], style, why)

    def _partial(self) -> list[str]:
        """Parameters that row layers of regions read directly. Raises PlanError for one that is used elsewhere too."""
        inside = {name for name, role in self._roles.items() if role.style == "row" and role.region is not None}
        found = []
        for param, readers in self._param_readers.items():
            if readers & inside and param in self._params and param not in self._shares:
                if readers - inside:
                    raise PlanError(
                        f"tensor parallelism: {param} is applied both to activations that are sharded and, before "
                        f"{listed(readers - inside)}, to whole ones; leave one of these whole with a plan"
                    )
                found.append(param)
        return found


def _agreed(parts: Sequence[dict[str, T]]) -> dict[str, T] | None:
    """All of them in one, unless two say different things of one name."""
    found: dict[str, T] = {}
    for part in parts:
        for name, value in part.items():
            if found.setdefault(name, value) != value:
                return None
    return found


def _owners(model: nn.Module, layers: Collection[str]) -> dict[int, list[str]]:
    """Parameter -> the layers that have it."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if name in layers:
            for param in module.parameters():
                found.setdefault(id(param), []).append(name)
    return found


def _reads_input(trial: Trial, call: Call) -> bool:
    """Whether an embedding looks up what was passed to the model, in whatever shape."""
    if call.layer.kind != "embedding":
        return False
    own = call.read.untyped_storage().data_ptr()
    return any(own == tensor.untyped_storage().data_ptr() for tensor in trial.inputs.tensors())


def _unfit(module: nn.Module) -> str:
    """Why a layer has to be whole, by what it is."""
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return "max_norm and scale_grad_by_freq need all rows"
    return ""
