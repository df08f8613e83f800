"""Parameters that travel in int8 and gradients that travel in int4: ZeRO++, `zero_quantized_weights` and
`zero_quantized_gradients` (Wang et al. 2023, arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dsprof.schema import FLOAT_BYTES

from ...align.groups import PARAMETER
from ...effect import Effect, WhatIfs
from ...study import Study
from ...whatif import WhatIf
from ..base import NotJudged
from .deepspeed_config import is_own_engine, need_zero
from .dimensions import GRADIENT, moved_bytes
from .possible_links import links_of_kinds
from .volume import formats, of_replicas, with_fewer_bytes

PACK_BETWEEN: Final = (0.5, 2.0)
"""Beside what is said below so little, or so much, packing may take on another CPU."""


@dataclass(frozen=True)
class _Packed:
    """What travels otherwise. bytes: of an element, with the scale of its block; sends_ns, takes_ns: what a core needs
    to pack an element, and to unpack one, as measured on blocks of 64 Ki to 4 Mi elements (int8 4.4 to 6.6 and 1.1 to
    1.4 ns, int4 5.3 to 11.3 and 1.3 to 4.2)."""

    key: str
    purpose: str
    what: str
    bytes: float
    sends_ns: float
    takes_ns: float
    packs_all: bool
    """Whether a rank packs all that travels, and not only its own shard."""
    note: str


_PACKED: Final[Mapping[str, _Packed]] = {
    "weights": _Packed(
        "zero_quantized_weights", PARAMETER, "gathers of parameters", 1 + 4 / 256, 5.5, 1.2, packs_all=False,
        note="parameters travel in int8: layers compute with weights that are rounded to it",
    ),
    "gradients": _Packed(
        "zero_quantized_gradients", GRADIENT, "reductions of gradients", 1 / 2 + 4 / 256, 8.0, 2.5, packs_all=True,
        note="gradients of matrices travel in int4: each is off by up to a seventh of half its block's largest",
    ),
}  # fmt: skip


def with_quantized(which: Literal["weights", "gradients"]) -> Callable[[Study, Any], Effect]:
    """What turning the key on changes. Raises NotJudged where the run does not tell it."""
    packed = _PACKED[which]

    def effect(study: Study, value: Any) -> Effect:
        if not isinstance(value, bool):
            raise NotJudged(f"{value} is neither true nor false")
        stage, config = need_zero(study)
        now = getattr(config.zero_optimization, packed.key)
        if value == now:
            return Effect("comm.volume")
        if now:
            raise NotJudged(f"what {packed.what} take in their own numbers is told by a run without {packed.key}")
        least = 1 if which == "gradients" and is_own_engine(study) else 3
        if stage < least:
            raise NotJudged(f"it takes stage {least}{'' if least == 3 else ' or more'}, and the run has {stage}")
        return _of_packed(study, packed)

    return effect


def _of_packed(study: Study, packed: _Packed) -> Effect:
    """All of it has fewer bytes; on a CPU, packing takes its cores."""
    domains = of_replicas(study, packed.purpose)
    if not domains:
        raise NotJudged(f"no {packed.what} were seen in steps")
    formats_of = formats(study)
    groups = [group for _, part in domains for group in part.groups]
    sizes = {FLOAT_BYTES.get(formats_of.get((group, packed.purpose), "")) for group in groups}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    if size is None or size <= packed.bytes:
        raise NotJudged(f"{packed.what} have few bytes already, or their number format was not captured")
    times = size / packed.bytes

    def fewer(certain: bool) -> WhatIfs:
        found: list[WhatIf] = []
        for whole, part in domains:  # a group's link is told by all that it moves
            found += with_fewer_bytes(part, links_of_kinds(whole), certain, times, (packed.purpose,))
        return tuple(found)

    packing_ms = 0.0
    if not study.on_gpu:
        for _, part in domains:
            sends = packed.sends_ns if packed.packs_all else packed.sends_ns / float(part.table["ranks"].mean())
            packing_ms += moved_bytes(study, part.table) / size * (sends + packed.takes_ns) / 1e6
    return Effect(
        "comm.volume", fewer(True), others=(((), fewer(False)),), costs_ms=packing_ms, costs_between=PACK_BETWEEN,
        counts_cores=True, notes=(packed.note,),
    )  # fmt: skip
