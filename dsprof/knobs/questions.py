"""How `dsprof whatif`'s words are read: what to take away, to scale and to set, and which questions that makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dsprof.analyzer.ask import Answers, Misasked, Request, Scaled, Turned, Without, ask
from dsprof.analyzer.layout.relayout import LayoutWanted
from dsprof.analyzer.memory.rank_memory import RankMemory
from dsprof.analyzer.signals import Missing
from dsprof.analyzer.structure import AUTO, PipelineStructure
from dsprof.analyzer.study import Study

from .knob import KnobError
from .layouts import held_in_structure
from .memory import memory_with
from .predicted import turned
from .registry import find, parse_settings, typed

BETWEEN_VALUES: Final = re.compile(r",(?![^\[]*\])")
"""A comma that is in no list, as of pipeline.partition_method=[0,4,8],[0,5,8]."""
Question = tuple[Request, ...]


class NotAnswered(Exception):
    """The steps of a run do not tell what a change saves; the message says why, and what to capture."""


def read_questions(
    without: Sequence[str],
    scaled: Sequence[str],
    settings: Sequence[str],
    sweeps: Sequence[str],
    run: str,
    structure: PipelineStructure | LayoutWanted | None = None,
) -> list[Question]:
    """Each change alone, then all together; of sweeps, each value of each beside all that is not swept.

    without: words CODE[:RANK,...]; scaled: PART=FACTOR; settings: KEY=VALUE; sweeps: KEY=VALUE,VALUE,...; run: as it is
    typed; structure: another one of the pipeline. Raises KnobError for what is no such word.
    """
    try:
        base: list[Request] = [_without(word) for word in without]
        base += [_scaled(word) for word in scaled]
    except Misasked as wrong:
        raise KnobError(str(wrong)) from None
    values = parse_settings(settings)
    base += [turned(key, value, run) for key, value in values.items()]
    base += [structure] if structure is not None else []
    says = [one.says for one in base]
    twice = next((one for one in says if says.count(one) > 1), None)
    if twice is not None:
        raise KnobError(f"{twice}: given twice")
    swept = [request for word in sweeps for request in _swept(word, values, run)]
    if not base and not swept:
        raise KnobError(
            "nothing to ask: give --without CODE, --scale PART=FACTOR, --set KEY=VALUE or --sweep KEY=VALUE,VALUE; "
            "of a pipeline --schedule, --micro-batches, --chunks or --boundaries; of a layout --zero-stage, --tp, "
            "--dp, --pp, --recompute or --offload"
        )
    if swept:
        whole = [tuple(base)] if base else []
        return [*whole, *((*base, one) for one in swept)]
    return [*((one,) for one in base), *([tuple(base)] if len(base) > 1 else [])]


def read_structure(
    schedule: str | None, microbatches: int | None, chunks: int | None, boundaries: str | None
) -> PipelineStructure | None:
    """The structure that these options ask for; None: they do not. Raises KnobError."""
    bounds: tuple[int, ...] | str | None = boundaries
    if boundaries is not None and boundaries.lower() == AUTO:
        bounds = AUTO
    elif boundaries is not None:
        try:
            bounds = tuple(int(word) for word in boundaries.split(","))
        except ValueError:
            raise KnobError(
                f"--boundaries {boundaries}: write auto, or the layers at which stages begin and their number, such as "
                "0,4,8"
            ) from None
    wanted = PipelineStructure(schedule, microbatches, chunks, bounds)
    return None if wanted == PipelineStructure() else wanted


def answer_questions(study: Study, questions: Sequence[Question]) -> Answers:
    """What each saves. Raises KnobError for what the run does not have, and NotAnswered where its steps cannot be
    replayed."""
    try:
        answers = ask(study, questions)
    except Misasked as wrong:
        raise KnobError(str(wrong)) from None
    except Missing as missing:
        raise NotAnswered(str(missing)) from None
    facts, ranks = study.facts, study.run.world_size or len(study.ranks)

    def memory(question: Question) -> tuple[RankMemory, ...]:
        known = held_in_structure(study, question)
        return known or memory_with(_knobs(question), study.memory_uses, facts, ranks)

    rows = [replace(row, memory=memory(question)) for row, question in zip(answers.rows, questions, strict=True)]
    return replace(answers, rows=tuple(rows))


def _knobs(question: Question) -> dict[str, Any]:
    """What a question turns, by key; nothing where it asks for another plan of a pipeline, too, which holds what it
    holds."""
    if not all(isinstance(one, Turned | Without | Scaled) for one in question):
        return {}
    return {one.key: one.value for one in question if isinstance(one, Turned)}


def _without(word: str) -> Without:
    code, colon, listed = (part.strip() for part in word.partition(":"))
    if not colon:
        return Without(code)
    ranks = [part.strip() for part in listed.split(",")]
    if not all(rank.isdecimal() for rank in ranks):
        raise KnobError(f"--without {word}: write CODE or CODE:RANK,RANK, such as rank.straggler:2")
    return Without(code, tuple(sorted({int(rank) for rank in ranks})))


def _scaled(word: str) -> Scaled:
    part, equals, text = (piece.strip() for piece in word.partition("="))
    try:
        factor = float(text)
    except ValueError:
        equals = ""
        factor = 0.0
    if not equals:
        raise KnobError(f"--scale {word}: write PART=FACTOR, such as link=10 or compute=0.5")
    return Scaled(part, factor)


def _swept(word: str, values: Mapping[str, Any], run: str) -> list[Request]:
    """A request for each value. values: what `--set` turns beside them."""
    key, _, listed = (part.strip() for part in word.partition("="))
    texts = [text.strip() for text in BETWEEN_VALUES.split(listed) if text.strip()]
    if not texts or not key:
        raise KnobError(f"--sweep {word}: write KEY=VALUE,VALUE, such as ddp.bucket_cap_mb=1,5,25")
    if key in values:
        raise KnobError(f"--sweep {key}: --set gives it a value, too; take one of them away")
    knob = find(key)
    found = {typed(key, value): value for value in (knob.read(text, key) for text in texts)}
    return [turned(key, value, run) for value in found.values()]
