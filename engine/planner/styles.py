"""What a plan may say of a layer, in dsprof's words and in Hugging Face's, and what was decided of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from torch import nn

from dsprof.words import did_you_mean, fits

from ..tensor.layers import Layer, layers_of
from .dependence import Bands, Share

Style = Literal["column", "column_gather", "row", "row_split", "vocab", "heads", "whole"]
"""`column`: each rank computes some of the outputs. `column_gather`: and then all ranks get all of them. `row`: each
rank reads the inputs that its part of a column layer wrote, and the results are summed. `row_split`: the same where
the input comes whole. `vocab`: each rank holds some of an embedding's rows. `heads`: each rank computes some of the
heads of an nn.MultiheadAttention. `whole`: every rank computes all of it."""

Wanted = Style | Literal["auto"]

HUGGING_FACE: Final[dict[str, Wanted]] = {
    "colwise": "column",
    "packed_colwise": "column",
    "local_colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "rowwise": "row",
    "packed_rowwise": "row",
    "local_rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocab",
    # What follows concerns modules that are not sharded: whether their gradients are partial is derived.
    "sequence_parallel": "whole",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
}
"""Style of a `tp_plan` of transformers -> ours."""


class PlanError(ValueError):
    """A plan that cannot be carried out, or one that cannot be derived; says what to write instead."""


def wanted_styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Wanted]:
    """Layer -> style, of an explicit plan. The first pattern that fits a layer counts.

    In a pattern `*` stands for any one part of a name, as in `blocks.*.mlp.up`. `whole` and `auto` (derive it) may be
    said of any module, and then hold for all layers in it; the others of layers. A layer that no pattern fits is
    `whole`. Raises PlanError for a pattern that fits nothing, and for an unknown style.
    """
    modules = dict(model.named_modules())
    layers = layers_of(model)
    found: dict[str, Wanted] = {}
    for pattern, said in plan.items():
        style = _style(pattern, said)
        named = [name for name in modules if fits(name, pattern)]
        if not named:
            parts = f"; its parts are {[n for n, _ in model.named_children()]}"
            hint = did_you_mean(pattern, modules, above=0.3, otherwise=parts)
            raise PlanError(f"tensor parallel plan: the model has no module {pattern!r}{hint}")
        for name in named:
            inside = {layer for layer in layers if layer == name or layer.startswith(f"{name}.") or not name}
            if style not in ("whole", "auto") and name not in layers:
                example = next(iter(sorted(inside)), None)
                raise PlanError(
                    f"tensor parallel plan: {name!r} is {said!r}, and a {type(modules[name]).__name__} is no linear "
                    f"layer, embedding or attention{f'; name one, such as {example!r}' if example else ''}"
                )
            for layer in inside:
                found.setdefault(layer, _for_embedding(style) if layers[layer].kind == "embedding" else style)
    return {layer: found.get(layer, "whole") for layer in layers}


def own_plan(model: nn.Module) -> dict[str, Any]:
    """The plan that a model of transformers carries: pattern -> style; empty for any other."""
    plan = getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, dict) else {}


def own_styles(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Wanted]:
    """Layer -> style, of a model's own plan, which covers more than this model has. What it does not name is `auto`,
    and so is what has a style for experts, or one for what is no layer."""
    found: dict[str, Wanted] = {}
    for name, layer in layers_of(model).items():
        said = next((style for pattern, style in plan.items() if fits(name, pattern)), None)
        style = HUGGING_FACE.get(said, "auto") if isinstance(said, str) else "auto"
        found[name] = _for_embedding(style) if layer.kind == "embedding" else style
    return found


def leave_whole(name: str) -> str:
    """How to leave `name` whole, in words, and what is called so in all blocks: with `*` for the first number in it."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    if numbers and numbers[0]:
        parts[numbers[0]] = "*"
    return f'leave it whole with a plan: {{"{".".join(parts)}": "whole", "*": "auto"}}'


def listed(names: Iterable[str]) -> str:
    """Names that share a beginning say it once: `blocks.0.attn.{q, k, v}`."""
    names = sorted(names)
    if len(names) < 2:
        return names[0] if names else "nothing"
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) == 1 and (parent := next(iter(parents))):
        return f"{parent}.{{{', '.join(name.rpartition('.')[2] for name in names)}}}"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _for_embedding(style: Wanted) -> Wanted:
    """Hugging Face calls an embedding sharded by its rows rowwise, too."""
    return "vocab" if style in ("row", "row_split") else style


def _style(pattern: str, said: Any) -> Wanted:
    known: tuple[str, ...] = (*get_args(Style), "auto")
    if said in known:
        return said  # type: ignore[no-any-return]
    if said in HUGGING_FACE:
        return HUGGING_FACE[said]
    raise PlanError(
        f"tensor parallel plan: {pattern!r} is {said!r}, which is no style; there are {', '.join(known)}"
        f"{did_you_mean(said, [*known, *HUGGING_FACE])}"
    )


@dataclass(frozen=True)
class Role:
    """How one layer is sharded."""

    module: str
    layer: Layer
    style: Style
    why: str
    bands: Bands | None = None
    region: int | None = None
    """Number of the sharded region that it belongs to."""

    heads: int = 0
    """Independent parts of the input of a row layer in a region."""

    shares: str = ""
    """First of the column layers that read the same activation."""

    def sharded_names(self) -> list[str]:
        """The parameters that are sharded, if the layer has them."""
        attention = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"]
        names = {
            "whole": [], "vocab": ["weight"], "row": ["weight"], "row_split": ["weight"],
            "column": ["weight", "bias"], "column_gather": ["weight", "bias"],
            "heads": [*attention, "out_proj.weight"],
        }[self.style]  # fmt: skip
        return [f"{self.module}.{name}".lstrip(".") for name in names]


@dataclass
class Roles:
    """What has been decided of a model."""

    roles: dict[str, Role] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
    """Parameters that are applied inside sharded regions."""

    shares: dict[str, Share] = field(default_factory=dict)
    """Those, and buffers, that are sharded like what they are applied to."""
