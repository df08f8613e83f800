"""What the analyzer says: findings, their evidence, predicted gains and fixes, and findings.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .text import quantity

Severity = Literal["high", "medium", "low", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("high", "medium", "low", "info")

MEASURED_EXCESS: Final = "measured excess"
"""`Gain.method` of costs outside ordinary steps."""

ALLOCATOR_TWIN: Final = "allocator twin"
MEASURED_MEMORY: Final = "measured memory"
"""`Gain.method` of what saves memory and no time: its ms are 0, and its rule says how severe it is."""

MEASURED_ON_DEVICE: Final = "measured on the device"
"""`Gain.method` of what devices' own kernels show in the traced steps: what it costs, not what a change would gain."""
REPLAYED_ON_DEVICE: Final = "replay of the traced steps"
"""`Gain.method` of the same where a change was replayed in those steps."""
UPPER_BOUND: Final = "upper bound"
"""`Gain.method` of what may gain nothing, and cannot gain more than devices stood idle for."""

FROM_SHAPES: Final = "shapes and data sheet"
"""`Gain.method` of what other arithmetic would gain: by the sizes of the layers and what their device reaches. It costs
precision, which is the user's to give: a remark, however much it is."""

LOW_PERCENT: Final = 1.0
MEDIUM_PERCENT: Final = 5.0
HIGH_PERCENT: Final = 15.0


@dataclass(frozen=True)
class Where:
    """The place a finding points at; what does not apply is None.

    dimension:  of the job's mesh, what is communicated in it: "dp" (`align.groups.Dimension.name`)
    coordinate: where in the mesh the ranks are, as far as all of them are there: {"dp": 1, "tp": 0}
    """

    ranks: tuple[int, ...] | None = None
    stage: int | None = None
    group: str | None = None
    op: str | None = None
    module: str | None = None
    steps: tuple[int, int] | None = None
    """First and last step, inclusive."""
    dimension: str | None = None
    coordinate: Mapping[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        ranks = None if self.ranks is None else list(self.ranks)
        steps = None if self.steps is None else list(self.steps)
        found = {
            "ranks": ranks, "stage": self.stage, "group": self.group,
            "op": self.op, "module": self.module, "steps": steps, "dimension": self.dimension,
            "coordinate": None if self.coordinate is None else dict(self.coordinate),
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Evidence:
    """One number that was measured, and what it would be in a healthy run."""

    metric: str
    value: float | str
    unit: str
    expected: float | str | None = None

    @property
    def as_expected(self) -> bool:
        """Whether it is, in the digits that are shown, what it is to be: then it accuses nobody."""
        return self.expected is not None and quantity(self.value, self.unit) == quantity(self.expected, self.unit)

    def to_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "unit": self.unit, "expected": self.expected}


@dataclass(frozen=True)
class Gain:
    """Predicted reduction of the step: mean, and the ends of its 95 % interval, in ms.

    `percent` is of the mean step. `method` says how it was predicted: by "replay" of the measured steps, by
    "simulation" of a pipeline's schedule, or as "measured excess": what irregular steps took beyond ordinary ones,
    divided over all steps; its percent is of a step with its share of that. "measured on the device" is what something
    cost in the traced steps, and "shapes and data sheet" what layers of these sizes would take otherwise.
    `unseen`: by how much less, and how much more, it may be since devices may have stood idle unseen, where that was
    replayed (`price.unseen_idle`); None: by as much as that is.
    """

    ms: float
    percent: float
    low: float
    high: float
    method: str = "replay"
    unseen: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ms": self.ms, "percent": self.percent, "low": self.low,
            "high": self.high, "method": self.method,
        }  # fmt: skip


NOTHING: Final = Gain(0.0, 0.0, 0.0, 0.0)
"""Of a remark on what no change that was tried shortens."""
NOT_PRICED: Final = Gain(0.0, 0.0, 0.0, 0.0, method="none")
"""Of what costs no part of a step that could be told, such as a job that hangs."""
SAVES_MEMORY: Final = Gain(0.0, 0.0, 0.0, 0.0, method=MEASURED_MEMORY)
SAVES_SEGMENTS: Final = Gain(0.0, 0.0, 0.0, 0.0, method=ALLOCATOR_TWIN)
"""Of what saves memory and no time."""


@dataclass(frozen=True)
class Fix:
    """A change the user can make.

    `patch` is, for kind `config`, a JSON Patch (RFC 6902) on the user's configuration; for `env`, entries
    {"name", "value"}; for `code`, entries {"file", "line", "argument", "value"} whose file and line are
    None where the call was not found.

    `knobs` is the same change as `dsprof run --set` takes it, by key, where it takes it. `diff` is it as a unified diff
    of the user's files, where it could be made.
    """

    kind: Literal["config", "env", "code"]
    title: str
    patch: tuple[dict[str, Any], ...] = ()
    gain: Gain | None = None
    knobs: tuple[tuple[str, Any], ...] = ()
    diff: str = ""

    def to_dict(self) -> dict[str, Any]:
        gain = None if self.gain is None else self.gain.to_dict()
        return {
            "kind": self.kind, "title": self.title, "patch": list(self.patch), "gain": gain, "set": dict(self.knobs),
            **({"diff": self.diff} if self.diff else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Together:
    """What fixing a finding saves together with one that hides it."""

    code: str
    gain: Gain

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "gain": self.gain.to_dict()}


@dataclass(frozen=True)
class Finding:
    """One diagnosis; its code is in FINDINGS and never changes meaning.

    gain:       what fixing it alone saves
    share:      its part of what fixing all that was found by replay saves; None: it was priced by itself
    together:   of a fault that another one hides: which one, and what fixing both saves
    by_rank:    of one on several ranks: what fixing it on one of them alone saves
    confidence: the share of such predictions that came true (`Rule.confidence`); None: none was ever tried
    unknown:    what makes the gain uncertain however many steps are profiled; empty: more steps would tell
    of_this_run: whether the gain is what it cost this run, of which nobody knows how often it comes
    replayed:   whether `dsprof whatif --without` replays the steps without it; else what its fixes do is what is asked
    """

    code: str
    title: str
    severity: Severity
    where: Where
    evidence: tuple[Evidence, ...]
    gain: Gain
    fixes: tuple[Fix, ...] = field(default=())
    confidence: float | None = None
    share: Gain | None = None
    together: Together | None = None
    by_rank: Mapping[int, Gain] = field(default_factory=dict)
    unknown: str = ""
    replayed: bool = False
    of_this_run: bool = False

    @property
    def weight(self) -> Gain:
        """What says how severe it is, and where it stands among the others: its share where it has one, as of two
        faults that hide each other neither gains anything alone."""
        return self.gain if self.share is None else self.share

    @property
    def telling(self) -> list[Evidence]:
        """The evidence that is shown: without what is as expected, where another piece is not."""
        return [item for item in self.evidence if not item.as_expected] or list(self.evidence)

    @property
    def is_problem(self) -> bool:
        """Whether it is more than a remark."""
        return self.severity != "info"

    def to_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "title": self.title,
            "severity": self.severity,
            "confidence": self.confidence,
            "where": self.where.to_dict(),
            "evidence": [item.to_dict() for item in self.evidence],
            "gain": self.gain.to_dict(),
            "share": None if self.share is None else self.share.to_dict(),
            "together": None if self.together is None else self.together.to_dict(),
            **({"by_rank": {str(rank): gain.to_dict() for rank, gain in self.by_rank.items()}} if self.by_rank else {}),
            "fixes": [fix.to_dict() for fix in self.fixes],
            **({"of_this_run": True} if self.of_this_run else {}),
        }


def severity_of(gain: Gain, noise_ms: float) -> Severity:
    """A finding stands above `info` only if the low end of its gain exceeds 1 % of the step and the noise.

    `noise_ms` is the run's own noise floor. The step is recovered from the gain's own percent. Of what irregular steps
    cost, only the low end counts: a stop that came once may not come again.
    """
    if gain.percent <= 0 or gain.ms <= 0:
        return "info"
    step_ms = gain.ms / gain.percent * 100
    if not gain.low > max(noise_ms, step_ms * LOW_PERCENT / 100):  # so that a NaN is `info`
        return "info"
    percent = gain.low / step_ms * 100 if gain.method == MEASURED_EXCESS else gain.percent
    if percent >= HIGH_PERCENT:
        return "high"
    return "medium" if percent >= MEDIUM_PERCENT else "low"
