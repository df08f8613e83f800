"""What rules share: how a rule declines, how it replays collectives in other pieces, how a fix names what to type and
where, what the job's configuration and hosts are, and how ranks and occasions are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..candidate import Candidate
from ..effect import Effect
from ..finding import Finding, Fix, Gain
from ..price.effects import effect_gains
from ..price.gains import LEAST_SHARE as LEAST_SHARE
from ..study import Study, once
from ..text import count
from ..whatif import Refused

OF_STEP: Final = 0.014
"""By which part of a step predictions of rules miss it, as calibrated (`price.calibration.ModelError.of_step`)."""
MOST_LISTED: Final = 8
"""Ranks that a title names."""

TRANSFORMERS_DDP: Final = frozenset({"bucket_cap_mb", "find_unused_parameters", "broadcast_buffers", "static_graph"})
"""Arguments of DistributedDataParallel that TrainingArguments has too, as `ddp_<argument>`."""
DDP_CALLS: Final = {
    "accelerate": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({setting})])",
    "lightning": "Trainer(strategy=DDPStrategy({setting}))",
}
"""Framework that makes the DistributedDataParallel -> the call in which its user sets an argument of it."""

OWN_ENGINE: Final = "dsprof"
"""Dialect of the configurations of dsprof's engine."""


class NotJudged(Exception):
    """The capture does not hold what the rule needs; the message says what is missing."""


class PartlyJudged(Exception):
    """Of a rule's codes some were judged, with what was found; for the others see the message."""

    def __init__(self, findings: Sequence[Candidate | Finding], unjudged: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.findings = findings
        self.unjudged = unjudged


class NotConcerned(Exception):
    """The job has nothing that the rule is about: it neither passed nor was left unjudged."""


def gains_tried(study: Study, effects: Sequence[Effect], untried: str) -> list[Gain]:
    """What each of several settings would gain alone. Where most steps do not allow one it raises NotJudged: `untried`,
    and why."""
    try:
        return effect_gains(study, effects)
    except Refused as refused:
        raise NotJudged(f"{untried}: {refused.why}") from None


INSTALLED: Final = ("/site-packages/", "/dist-packages/")


Knobs = Mapping[str, Any]
"""A change as `dsprof run --set` takes it, by key."""
NO_KNOBS: Final[Knobs] = {}


def code_fix(
    title: str, argument: str, value: Any, site: str | None, gain: Gain | None = None, knobs: Knobs = NO_KNOBS
) -> Fix:
    """A change of one argument at `site` (`file:line`), or somewhere in the script where the call was not seen."""
    return settings_fix(title, {argument: value}, site, gain, knobs)


def place_fix(title: str, site: str | None, gain: Gain | None = None) -> Fix:
    """A change at `site` that is no other argument of the call there."""
    file, line = _own_line(site)
    if line is None:
        return Fix("code", title, gain=gain)
    return Fix("code", title, ({"file": file, "line": line, "argument": "", "value": ""},), gain)


def settings_fix(
    title: str, settings: Mapping[str, Any], site: str | None, gain: Gain | None = None, knobs: Knobs = NO_KNOBS
) -> Fix:
    """A change of several arguments of one call at `site`; without a site, of flags on the command line, or of a call
    that was not seen. A call in an installed package is not the user's to change: that is said, and no place given."""
    package = installed(site)
    if package:
        title += f"; {package.partition('/')[0]} makes this call: look for a setting of its own"
    file, line = _own_line(site)
    patch = tuple(
        {"file": file, "line": line, "argument": argument, "value": value} for argument, value in settings.items()
    )
    return Fix("code", title, patch, gain, tuple(knobs.items()))


def ddp_argument_fix(
    fact: Mapping[str, Any], argument: str, value: Any, gain: Gain | None = None, note: str = ""
) -> Fix:
    """Another value for an argument of the DistributedDataParallel that stated `fact`, as its user would write it.

    `note` goes behind the title. Where a framework makes the DDP the user has no such call, so the fix is that
    framework's flag or call, and names no line.
    """
    framework, setting = fact.get("framework"), f"{argument}={written(value)}"
    knobs = {f"ddp.{argument}": value}
    if framework == "transformers" and argument in TRANSFORMERS_DDP:
        flag = f"--ddp_{argument}"
        title = f"{flag} {written(value)}, or TrainingArguments(ddp_{setting})"
        return settings_fix(title + note, {flag: value}, None, gain, knobs)
    if framework in DDP_CALLS:
        call = DDP_CALLS[framework].format(setting=setting)
        return settings_fix(call + note, {call: value}, None, gain, knobs)
    if framework:
        title = f"DistributedDataParallel({setting}), which {framework} makes"
        return settings_fix(title + note, {argument: value}, None, gain, knobs)
    site = fact.get("site")
    return settings_fix(f"DistributedDataParallel({setting}){at(site)}{note}", {argument: value}, site, gain, knobs)


def written(value: Any) -> str:
    """A value as it is typed: 25, 0.5, True, "text"."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def at(site: str | None) -> str:
    """` (train.py:12)` for a title, ` (package/module.py:12)` of an installed package's, or nothing."""
    return f" ({installed(site) or site.rpartition('/')[2]})" if site else ""


def _own_line(site: str | None) -> tuple[str | None, int | None]:
    """File and line of a site, where it is not an installed package's; None: not known."""
    file, _, line = ("" if installed(site) else site or "").rpartition(":")
    return file or None, int(line) if line.isdigit() else None


def installed(site: str | None) -> str:
    """`package/module.py:12`, if that is where `site` is; else nothing."""
    return next((site.rpartition(home)[2] for home in INSTALLED if site and home in site), "")


def configurations(study: Study, dialect: str | None = None) -> list[Mapping[str, Any]]:
    """The job's JSON configurations (DeepSpeed's, or those of dsprof's engine), or those of one dialect, as far as they
    were captured."""
    facts = [fact for fact in study.facts.get("config", []) if dialect in (None, fact.get("dialect"))]
    contents = [fact.get("content") for fact in facts]
    return [content for content in contents if isinstance(content, Mapping)]


def config_sections(study: Study, name: str) -> list[Mapping[str, Any]]:
    """Their sections of a name."""
    return [one for content in configurations(study) if isinstance(one := content.get(name), Mapping)]


def engine_config(study: Study) -> Mapping[str, Any] | None:
    """The configuration of dsprof's engine that ran; None: it did not run, or what it says was too long to be kept."""
    return next(iter(configurations(study, OWN_ENGINE)), None)


def zero_stage(study: Study) -> int | None:
    """DeepSpeed's stage of ZeRO; None where it does not train, or does not say."""
    stages = [fact["zero_stage"] for fact in study.facts.get("deepspeed", []) if fact.get("zero_stage") is not None]
    return int(stages[0]) if stages else None


def without_effect(study: Study, like: str, why: str) -> Effect:
    """Of a setting by which the same is communicated, and waited for, at other places: it saves nothing, give or take
    what steps of a prediction are missed by. like: the code of the rule whose predictions are of the same kind"""
    return Effect(like, unsure_ms=OF_STEP * study.step_ms, notes=(why,))


def sharded_stage(study: Study) -> int:
    """What is divided over the data-parallel ranks, as a stage of ZeRO: 1 the optimizer's states, 2 gradients too, 3
    parameters too, as FSDP does; 0 nothing, as far as is known. By DeepSpeed itself, else by what is configured."""
    if study.facts.get("fsdp"):
        return 3
    told = (section.get("stage") for section in config_sections(study, "zero_optimization"))
    return zero_stage(study) or next((int(stage) for stage in told if isinstance(stage, int)), 0)


def hosts_of(study: Study, ranks: Iterable[int]) -> set[str]:
    """The hosts that ranks ran on, as far as they are known."""
    host_of = _host_of(study)
    return {host for rank in ranks if (host := host_of.get(rank))}


@once
def _host_of(study: Study) -> dict[int, str]:
    return {item.rank: item.host for item in study.run.ranks}


def listed(ranks: Sequence[int]) -> str:
    """`0, 3, 7`: the first MOST_LISTED."""
    return ", ".join(map(str, ranks[:MOST_LISTED]))


def often(steps: npt.NDArray[np.bool_]) -> str:
    """`2 times in 40 steps`, of those that were looked at for what is irregular."""
    return f"{count(int(steps.sum()), 'time')} in {count(len(steps), 'step')}"


def script_of(study: Study) -> str | None:
    """The training script, as a site without a line."""
    script = next((fact.get("script") for fact in study.facts.get("process", [])), None)
    return f"{script}:" if script else None
