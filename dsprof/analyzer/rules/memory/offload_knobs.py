"""Offloading turned off: what is copied for it, and waited for, gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...effect import Effect
from ...study import Study
from ...whatif.work import Change, LessWork
from ..base import NotJudged
from .offload_exposed import offloaded, offloading_sections

AWAY: Final = ("cpu", "nvme")


def with_offload(name: str) -> Callable[[Study, Any], Effect]:
    """What `zero_optimization.<name>` changes: a section, its device, or nothing."""

    def effect(study: Study, value: Any) -> Effect:
        wanted = value.get("device") if isinstance(value, dict) else value
        sections = offloading_sections(study)
        now = sections.get(name, {}).get("device")
        if wanted == now or (wanted not in AWAY and now is None):
            return Effect("offload.exposed")
        if wanted in AWAY:
            if now is None:
                raise NotJudged("how long copies would take is not told by a run that offloads nothing of it")
            raise NotJudged(f"the run offloads to {now}, and how fast {wanted} is was not measured")
        if len(sections) > 1:
            raise NotJudged(
                f"the run offloads {' and '.join(sections)}, and which of the waits is for which is not told apart"
            )
        if offloaded(study) is None:
            raise NotJudged("what is copied for it was not recorded")
        notes = ["copies to where it is kept, and waiting for them, are gone"]
        if name == "offload_optimizer" and now == "cpu" and study.on_gpu:
            notes.append(
                "the device then updates what the host does now: how long it takes was not measured, and is not counted"
            )
        less = LessWork(f"{name}", Change({"offload": study.work("offload")}), study.peer_groups)
        return Effect("offload.exposed", (less,), notes=tuple(notes))

    return effect
