"""Another layout of a job, as `dsprof whatif` is asked about it, and what ranks would hold in another structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsprof.analyzer.ask import Request
from dsprof.analyzer.layout import DUAL_PIPE_V, Layout, layout_costs
from dsprof.analyzer.layout.relayout import OFFLOAD, RECOMPUTE, LayoutWanted, memory_of
from dsprof.analyzer.memory.rank_memory import RankMemory
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.structure import NAMES, PipelineStructure, restructured
from dsprof.analyzer.study import Study
from dsprof.words import did_you_mean

from .knob import KnobError

IN_PARTS = ("interleaved", DUAL_PIPE_V)
"""Schedules that are of two parts of the model on each rank, unless another number is given."""


def read_layout(
    *, pp: int | None, dp: int | None, tp: int | None, zero_stage: int | None, recompute: str | None,
    offload: str | None, schedule: str | None, micro_batches: int | None, chunks: int | None, boundaries: str | None,
) -> LayoutWanted | None:  # fmt: skip
    """What is asked of a layout, with what is asked of its pipeline; None: nothing beyond that. Raises KnobError."""
    if (pp, dp, tp, zero_stage, recompute, offload) == (None,) * 6:
        return None
    for name, word, words in (("recompute", recompute, RECOMPUTE), ("offload", offload, OFFLOAD)):
        if word not in (None, *words):
            raise KnobError(f"--{name} {word}: write one of {', '.join(words)}")
    if boundaries is not None:
        raise KnobError("--boundaries is of the pipeline that ran; another layout's stages are divided by their layers")
    if schedule is not None:
        known = NAMES.get(schedule.lower())
        if known is None:
            names = ", ".join(sorted(set(NAMES.values())))
            hint = did_you_mean(schedule, NAMES, otherwise=f"; there are {names}", show=str)
            raise KnobError(f"--schedule {schedule}: no schedule of this name can be predicted{hint}")
        schedule, chunks = known, chunks or (2 if known in IN_PARTS else 1)
    return LayoutWanted(pp, dp, tp, zero_stage, recompute, offload, schedule, micro_batches, chunks)


def held_in_structure(study: Study, question: Sequence[Request]) -> tuple[RankMemory, ...]:
    """What each rank takes and would take, of a question about another structure and nothing else; empty: of another
    question, or not known."""
    if len(question) != 1:
        return ()
    (asked,) = question
    try:
        if isinstance(asked, LayoutWanted):
            return asked.memory(study)
        if isinstance(asked, PipelineStructure):
            return memory_of(study, _as_layout(study, asked))
    except (NotJudged, ValueError):
        return ()
    return ()


def _as_layout(study: Study, structure: PipelineStructure) -> Layout:
    ran, found = layout_costs(study).ran, restructured(study, structure)
    size = ran.micro_batches / found.plan.microbatches if structure.same_batch else 1.0
    return replace(
        ran, schedule=found.plan.schedule, chunks=found.plan.virtual_stages, micro_batches=found.plan.microbatches,
        micro_batch=size, boundaries=found.boundaries,
    )  # fmt: skip
