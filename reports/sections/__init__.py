"""The one list of sections. The HTML report, the TensorBoard tab and notebooks show it, each in its own way and all
with the same words and numbers.

section         what a section is made of
head            what stands above all of them
findings        what to do, worst first
time_and_step   where the run goes, and where a step
over_steps      who was slower and when, one step as a timeline, step by step, collectives
pipeline        one step of a pipeline, measured above ideal
lines_of_ranks  in which lines a rank's step goes, and in which it differs from its peers
on_devices      what devices did and told, how well they are used
ranks_table     one line a rank
memory_tables   what memory was for, what allocators held
modules_table   what each module takes
judged          what was judged, and what the run was
glossary        what the words of all of them mean

To add a section is to add a `Maker` to the list here; the glossary is made last, of what the others say.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from dsprof.analyzer.analysis import Analysis

from . import (
    findings,
    judged,
    lines_of_ranks,
    memory_tables,
    modules_table,
    on_devices,
    over_steps,
    pipeline,
    ranks_table,
    time_and_step,
)
from .glossary import ID as GLOSSARY
from .glossary import glossary_of
from .head import head
from .section import Maker, Report, Section

MAKERS: Final[tuple[Maker, ...]] = (
    findings.FINDINGS,
    time_and_step.STEP,
    time_and_step.TIME,
    over_steps.HEATMAP,
    lines_of_ranks.LINES,
    pipeline.PIPELINE,
    over_steps.TIMELINE,
    over_steps.STEPS,
    over_steps.COLLECTIVES,
    on_devices.DEVICE_TIME,
    on_devices.DEVICES,
    ranks_table.RANKS,
    on_devices.EFFICIENCY,
    memory_tables.USE,
    memory_tables.ALLOCATORS,
    modules_table.MODULES,
    judged.JUDGED,
    judged.RUN,
)

__all__ = ["MAKERS", "Maker", "Report", "Section", "report_of"]


def report_of(
    analysis: Analysis, only: Collection[str] = (), *, step: int | None = None, ranks: tuple[int, ...] = ()
) -> Report:
    """The report of a run, for whatever shows it. only: the ids of the sections that are wanted; all, if none is.
    step, ranks: of the timeline, in the place of those that are worth a look."""
    made = [maker.make(analysis) for maker in MAKERS if not only or maker.id in only]
    sections = [section for section in made if section is not None]
    if step is not None or ranks:
        sections = [
            replace(section, blocks=(over_steps.chosen_step(analysis, step, ranks),))
            if section.id == over_steps.TIMELINE.id else section
            for section in sections
        ]  # fmt: skip
    top = head(analysis)
    words = glossary_of(top, sections) if not only or GLOSSARY in only else None
    return Report(top, (*sections, *([] if words is None else [words])))
