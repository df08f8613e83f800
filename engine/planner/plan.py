"""A tensor parallel plan: what is sharded how and why, as a table, and what its communications cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .blocks import Stack
from .styles import Role
from .verify import Arrangement

_Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
_When = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """One communication in a training step of one micro-batch."""

    module: str
    name: _Collective
    when: _When
    bytes: int
    """Of the whole tensor."""

    seconds: float


@dataclass(frozen=True)
class Cost:
    """What the communications of a plan cost for one micro-batch, forward and backward, if nothing overlaps them."""

    collectives: tuple[Collective, ...]
    layers: int
    """Repeated blocks in which there are any; at least 1."""

    per_layer: tuple[Collective, ...]
    """Those of the first of these blocks; all, if there are none."""

    @property
    def bytes(self) -> int:
        """Sum over the collectives."""
        return sum(one.bytes for one in self.collectives)

    @property
    def seconds(self) -> float:
        """Sum over the collectives."""
        return sum(one.seconds for one in self.collectives)

    def __str__(self) -> str:
        return (
            f"{len(self.per_layer)} collectives a layer x {self.layers}, {len(self.collectives)} in all: "
            f"{self.bytes / 1e6:.3g} MB, {1e3 * self.seconds:.3g} ms a micro-batch"
        )


@dataclass(frozen=True)
class TensorPlan:
    """How a model is sharded over `size` ranks. `str(plan)` is a table of it."""

    size: int
    roles: tuple[Role, ...] = ()
    arrangement: Arrangement = field(default_factory=Arrangement)
    stack: Stack | None = None
    """Where the sequence is sharded too."""

    partial: tuple[str, ...] = ()
    """Replicated parameters whose gradient is a sum over the ranks."""

    random_regions: tuple[int, ...] = ()
    """Sharded regions that draw random numbers in training."""

    element_size: int = 4
    """Bytes of an activation's element."""

    others: tuple[tuple[str, str], ...] = ()
    """Modules with weights, and their classes, that are no layers and so are whole."""

    def cost(self, batch: int, sequence: int, alpha_s: float, beta_bytes_per_s: float) -> Cost:
        """The alpha-beta model of a ring: a collective of S bytes over n ranks takes (n-1) (alpha + S / (n beta)), and
        an all-reduce twice that.

        `batch` is of the micro-batch, `sequence` in tokens, `alpha_s` seconds a message, `beta_bytes_per_s` the
        bandwidth of a link. Raises ValueError for numbers that none of these can be.
        """
        for name, value, least in (("batch", batch, 1), ("sequence", sequence, 1), ("alpha_s", alpha_s, 0)):
            if not value >= least:
                raise ValueError(f"TensorPlan.cost: {name} is {value}; write {least} or more")
        if not beta_bytes_per_s > 0:
            raise ValueError(f"TensorPlan.cost: beta_bytes_per_s is {beta_bytes_per_s}; write more than 0, bytes/s")
        made = []
        for module, name, when, elements in self._collectives(batch * sequence):
            size = elements * self.element_size
            seconds = (self.size - 1) * (alpha_s + size / (self.size * beta_bytes_per_s))
            made.append(Collective(module, name, when, size, 2 * seconds if name == "all_reduce" else seconds))
        blocks: dict[str, list[Collective]] = {}
        for one in made:
            found = re.match(r"(.*?\.)?\d+(?=\.)", one.module)
            if found is not None:
                blocks.setdefault(found[0], []).append(one)
        first = next(iter(blocks.values()), made)
        return Cost(tuple(made), max(1, len(blocks)), tuple(first))

    def _collectives(self, tokens: int) -> Iterator[tuple[str, _Collective, _When, int]]:
        """Module, name, when, and elements of the whole tensor."""
        if self.size == 1:
            return
        for role in self.roles:
            name, layer = role.module, role.layer
            reads, writes = tokens * layer.inputs, tokens * layer.outputs
            in_blocks = self.stack is not None and self.stack.holds(name)
            enters: list[tuple[_Collective, _When, int]] = [("all_reduce", "backward", reads)]
            leaves: list[tuple[_Collective, _When, int]] = [("all_reduce", "forward", writes)]
            if in_blocks and (role.region is not None or role.style == "heads"):
                enters = [("all_gather", "forward", reads), ("reduce_scatter", "backward", reads)]
                leaves = [("reduce_scatter", "forward", writes), ("all_gather", "backward", writes)]
            if role.style in ("column", "column_gather", "heads") and role.shares in ("", name):
                yield from ((name, *one) for one in enters)
            if role.style in ("row", "row_split", "heads", "vocab"):
                yield from ((name, *one) for one in leaves)
            if role.style == "row_split":
                yield name, "all_gather", "backward", reads
            if role.style == "column_gather":
                yield name, "all_gather", "forward", writes
            if role.bands is not None and role.bands.copies > 1:
                yield name, "all_reduce", "backward", layer.inputs * layer.outputs
        if self.stack is not None:
            leaving = [role for role in self.roles
                       if role.style == "heads" or (role.region is not None and role.style == "row")]  # fmt: skip
            ends: list[tuple[str, _When]] = [(self.stack.last, "forward"), (self.stack.first, "backward")]
            for block, when in ends:  # which may be on other stages of a pipeline
                if any(Stack((block,), self.stack.dim).holds(role.module) for role in self.roles):
                    yield block, "all_gather", when, tokens * leaving[0].layer.outputs

    def __str__(self) -> str:
        lines = [f"tensor parallel plan over {self.size} ranks" + ("" if self.roles else ": nothing is sharded")]
        rows = _folded([(role.module, role.style, role.why) for role in self.roles])
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
        lines += [f"  {name:<{widths[0]}}  {style:<{widths[1]}}  {why}" for name, style, why in rows]
        changed: dict[str, list[str]] = {}
        for change in self.arrangement.changes:
            changed.setdefault(change.module, []).append(f"{change.attribute} {change.before} -> {change.after}")
        for module, override in self.arrangement.overrides:
            changed.setdefault(module, []).append(f"its input reports {override}")
        for name, what in _folded([(name, ", ".join(said)) for name, said in changed.items()]):
            lines.append(f"  {name or 'the model'}: {what}")
        if self.stack is not None:
            lines.append(
                f"  sequence (dimension {self.stack.dim}) sharded from {self.stack.first} to {self.stack.last}"
            )
        lists: dict[str, list[tuple[str, ...]]] = {
            "whole, for they are no layers that can be sharded": [(name, f"({kind})") for name, kind in self.others],
            "sharded with what they are applied to": [(name,) for name, _ in self.arrangement.shares],
            "gradients summed over the ranks": [(name,) for name in self.partial],
        }
        lines += [f"  {what}: {', '.join(map(' '.join, _folded(rows)))}" for what, rows in lists.items() if rows]
        return "\n".join(lines)


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that differ in the number of a block alone are said once, with `*` for it."""
    starred = [tuple(map(_starred, row)) for row in rows]
    said = Counter(row[0] for row in dict.fromkeys(starred))
    return list(dict.fromkeys(s if said[s[0]] == 1 else row for s, row in zip(starred, rows, strict=True)))


def _starred(text: str) -> str:
    """In each name with dots the first number that is a part of it, as `*`: the number of the block."""
    return re.sub(r"(?<![\w.])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\.)\d+(?=[.,:]|\s|$)", r"\1*", text)
