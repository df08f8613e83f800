"""What was judged, and what the run was."""

from __future__ import annotations

import json
from typing import Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.text import clean, count, spans

from .. import wording
from .section import Block, Codes, Column, Folded, Maker, Row, Said, Words, always, table

MOST_FACTS: Final = 100


def _judged(analysis: Analysis) -> list[Block]:
    blocks: list[Block] = []
    if analysis.passed:
        blocks.append(Codes("Passed", tuple(map(clean, analysis.passed)), good=True))
    for reason, codes in wording.by_reason(analysis.not_judged):
        blocks.append(Codes("Not judged", tuple(map(clean, codes)), reason))
    if not blocks:
        blocks.append(Words("No rule says that it ran."))
    noise = wording.noise(analysis)
    if noise:
        blocks.append(
            Words(
                f"Noise of this run: {noise}. A finding whose gain is not sure to be above it, and above 1 % of the "
                "step, is only a remark."
            )
        )
    return blocks


def _run(analysis: Analysis) -> list[Block]:
    run = analysis.run
    ended = f", ended {wording.moment(run.ended)}" if run.ended else ""
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in run.versions.items())
    source = ("imported from", wording.imported_from(run.imported)) if run.imported else ("level", clean(run.level))
    lines = [
        ("capture", wording.capture_facts(analysis)),
        ("command", wording.command(run.command) or "not known"),
        ("in", clean(run.cwd)),
        ("started", f"{wording.moment(run.started)}{ended}" if run.started else ""),
        ("status", "" if run.status is None else str(run.status)),
        source,
        ("versions", versions),
    ]
    blocks: list[Block] = [Said(tuple((label, words) for label, words in lines if words))]
    facts = _facts(analysis)
    if facts:
        columns = (Column("what"), Column("where", code=True), Column("how"), Column("ranks"))
        summary = f"{count(len(facts), 'fact')} that the ranks told of their set-up"
        blocks.append(Folded(summary, (table(columns, facts),)))
    return blocks


def _facts(analysis: Analysis) -> list[Row]:
    """What the ranks said of themselves, those that said the same together."""
    equal: dict[str, list[int]] = {}
    for fact in analysis.run.facts:
        words = json.dumps({key: value for key, value in fact.items() if key != "rank"}, default=str)
        equal.setdefault(words, []).append(int(fact.get("rank", -1)))
    rows = []
    for words, ranks in list(equal.items())[:MOST_FACTS]:
        fact = json.loads(words)
        name, site = fact.pop("fact", ""), fact.pop("site", "") or ""
        said = ", ".join(f"{key}={value}" for key, value in fact.items())
        rows.append(Row((clean(name), clean(site), clean(said, 1000), spans(ranks))))
    return rows


JUDGED = Maker("judged", "What was judged", always, lambda _: "", _judged)
RUN = Maker("run", "Capture and run", always, lambda _: "", _run)
