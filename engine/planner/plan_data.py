"""How the layers of a model are cut, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tensor.layers import Layer
from .dependence import Bands, Share
from .styles import Style


@dataclass(frozen=True)
class Role:
    """How one layer is cut."""

    module: str
    layer: Layer
    style: Style
    why: str
    bands: Bands | None = None
    region: int | None = None
    """Number of the cut region that it belongs to."""

    heads: int = 0
    """Independent parts of the input of a row layer in a region."""

    shares: str = ""
    """First of the column layers that read the same activation."""

    def cut_names(self) -> list[str]:
        """The parameters that are cut, if the layer has them."""
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
    """Parameters that are applied inside cut regions."""

    shares: dict[str, Share] = field(default_factory=dict)
    """Those, and buffers, that are cut like what they are applied to."""
