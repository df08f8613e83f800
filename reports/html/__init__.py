"""The bottleneck report: one HTML file that needs no network and sends nothing.

The run's own strings (command, names, paths) are untrusted: the template escapes them, figures travel as JSON
that is never executed, and the Content-Security-Policy names the two scripts by their hashes, so that no other
script can run and nothing can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from dsprof.analyzer import text
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.budget.irregular import profiled_steps
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.memory.allocator_state import segment_uses
from dsprof.analyzer.rules.registry import ends_run
from dsprof.run import last_processes
from dsprof.trace import concat_rows

from .. import device, efficiency, memory, palette, plots, tables, wording
from ..timeline import timeline

HERE: Final = Path(__file__).parent

TIMELINE_RANKS: Final = 8
DEVICE_RANKS: Final = 8
MOST_SNAPSHOTS: Final = 8
"""Devices whose segments are drawn."""
MOST_MODULES: Final = 40
"""That are listed."""

_IN_SCRIPT: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(analysis: Analysis) -> str:
    """The whole report as one HTML document."""
    plotly_js, page_js = _asset("plotly-cartesian.min.js"), _asset("page.js")
    figures, ranks = _figures(analysis), _rank_rows(analysis)
    return _template().render(
        analysis=analysis,
        run=analysis.run,
        step=analysis.step_ms,
        tone=wording.tone(analysis),
        verdict=analysis.verdict,
        times=_times(analysis),
        problems=[_card(finding, analysis.run.cwd) for finding in wording.problems(analysis)],
        minor=[_card(finding, analysis.run.cwd) for finding in wording.remarks(analysis)],
        budget=_budget(analysis),
        rank_parts=[part for part in analysis.budget_by_rank if (analysis.budget_by_rank[part] > 0.005).any()],
        rank_rows=ranks,
        hosts=any(row["host"] for row in ranks),
        endings=any(row["ended"] for row in ranks),
        on_devices=analysis.delays is not None,
        blamed=_blamed(analysis),
        memory=analysis.memory,
        memory_line=memory.line(analysis.memory_uses),
        device_lines=device.lines(analysis),
        efficiency_tiles=efficiency.tiles(analysis),
        efficiency_lines=efficiency.lines(analysis),
        module_rows=efficiency.module_rows(analysis, MOST_MODULES),
        modules_unseen=efficiency.unseen(analysis),
        recomputed=bool(len(analysis.modules) and (analysis.modules["recompute_ms"] > 0).any()),
        counted=bool(len(analysis.modules) and analysis.modules["gflop"].notna().any()),
        modules_left=max(len(analysis.modules) - MOST_MODULES, 0),
        marks=len(analysis.irregular),
        not_judged=wording.by_reason(analysis.not_judged),
        warnings=wording.capture_warnings(analysis),
        capture=wording.capture_facts(analysis),
        facts=_facts(analysis),
        notes={name: figure.layout.meta["note"] for name, figure in figures.items()},
        heights={name: figure.layout.height for name, figure in figures.items()},
        figures=Markup(_script_json({name: _plain(figure) for name, figure in figures.items()})),
        parts=palette.PARTS,
        text=text,
        word=wording,
        style=Markup(_asset("page.css")),
        plotly_js=Markup(plotly_js),
        page_js=Markup(page_js),
        policy=_policy(plotly_js, page_js),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["clean"] = text.clean
    environment.filters["unbroken"] = wording.unbroken
    environment.filters["ms"] = text.ms
    environment.filters["size"] = text.size
    environment.filters["percent"] = text.percent
    return environment.get_template("page.html.j2")


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Nothing but these two scripts, our styles, and the pictures that plotly draws itself."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return "".join(_IN_SCRIPT.get(char, char) for char in text)


def _plain(figure: Any) -> dict[str, Any]:
    """The figure as data; its title and note stand on the page instead."""
    plain: dict[str, Any] = json.loads(figure.to_json())
    plain["layout"].pop("title", None)
    plain["layout"].pop("meta", None)
    return plain


def _figures(analysis: Analysis) -> dict[str, Any]:
    figures = {}
    if wording.kinds_of_time(analysis.time):
        figures["time"] = plots.time_bar(analysis.time)
        figures["time"].update_layout(showlegend=False, height=86)  # the table below it has the colours
    if analysis.step_ms is not None:
        figures["budget"] = plots.budget_bar(analysis.budget_by_rank, analysis.budget)
        figures["heatmap"] = plots.heatmap(analysis.steps, analysis.delays)
        if analysis.steps["step"].nunique() > 1:
            figures["steps"] = plots.step_time(
                analysis.steps, analysis.irregular, profiled_steps(analysis.run), highlight=_blamed(analysis)
            )
    collectives = plots.collectives(analysis.collectives)
    if collectives.data:
        figures["collectives"] = collectives
    uses = memory.main_uses(analysis.memory_uses)
    if uses:
        figures["memory"] = memory.over_steps(
            analysis.memory_steps, uses, profiled_steps(analysis.run), highlight=_hungry(analysis)
        )
        figures["memory-parts"] = memory.by_part(uses)
    for at, held in enumerate(analysis.memory[:MOST_SNAPSHOTS]):
        if held.total("reserved"):
            uses_of = segment_uses(analysis.trace.memory[held.rank], held.device)
            figures[f"segments-{at}"] = memory.segments(uses_of)
    watched = sorted({int(fact["rank"]) for fact in analysis.run.facts if fact.get("fact") == "gpu"})
    if watched:
        named = [rank for finding in analysis.findings for rank in finding.where.ranks or ()]
        told = tables.device_gauges(analysis.trace, tables.pick_ranks(watched, named, DEVICE_RANKS))
        if len(told):
            figures["devices"] = plots.devices(told, of_ranks=len(watched))
    step, why = _step_to_show(analysis)
    if step is not None:
        named = [rank for finding in analysis.findings for rank in finding.where.ranks or ()]
        if analysis.slowest_rank is not None:
            named.insert(0, analysis.slowest_rank)
        ranks = tables.pick_ranks(sorted(analysis.ranks_captured), named, TIMELINE_RANKS)
        rows = concat_rows([analysis.trace.read(rank) for rank in ranks])
        figure = timeline(
            rows, step, waits=analysis.waits, collectives=analysis.collectives, max_ranks=TIMELINE_RANKS,
            of_ranks=len(analysis.ranks_captured),
        )  # fmt: skip
        figure.layout.meta = {"note": figure.layout.meta["note"].replace(f"step {step}", f"step {step}, {why}", 1)}
        figures["timeline"] = figure
    return figures


def _step_to_show(analysis: Analysis) -> tuple[int | None, str]:
    """The step of the timeline: where the run broke, else a typical one."""
    broken = any(ends_run(finding.code) for finding in analysis.findings)
    if analysis.ranks_captured and (broken or analysis.step_ms is None):
        numbers = (analysis.trace.read(rank, ("step",))["step"] for rank in analysis.trace.ranks)
        last = max((int(of_rank.max()) for of_rank in numbers if len(of_rank)), default=-1)
        return (last, "the last one begun") if last >= 0 else (None, "")
    alone = analysis.steps["step"].nunique() == 1
    return tables.typical_step(analysis.steps), "the only one" if alone else "the ordinary one nearest to the mean"


def _blamed(analysis: Analysis) -> int | None:
    """The rank that the others wait for most in ordinary steps, where a finding says that it matters."""
    waited_for = [item for item in wording.problems(analysis) if palette.part_of(item.code) in palette.WAITING]
    named = {rank for finding in waited_for for rank in finding.where.ranks or ()}
    return analysis.slowest_rank if analysis.slowest_rank in named else None


def _hungry(analysis: Analysis) -> int | None:
    """The rank that a finding about memory names."""
    about = [item for item in wording.problems(analysis) if item.code.startswith("memory.")]
    return next((rank for finding in about for rank in finding.where.ranks or ()), None)


def _card(finding: Finding, cwd: str) -> dict[str, Any]:
    part, kind = palette.part_of(finding.code), palette.kind_of(finding.code)
    color = palette.part(part).color if part else palette.TIMES[kind].color if kind else palette.HIGHLIGHT
    return {
        "code": finding.code,
        "title": text.clean(finding.title),
        "severity": finding.severity,
        "color": color,
        "confidence": wording.confidence(finding),
        "gain": finding.gain if finding.gain.ms > 0 else None,
        "together": wording.saving(finding) if finding.together is not None else "",
        "where": wording.where(finding.where),
        "evidence": [
            {
                "metric": text.clean(item.metric),
                "value": text.quantity(item.value, item.unit),
                "expected": "" if item.expected is None else text.quantity(item.expected, item.unit),
            }
            for item in finding.evidence
        ],
        "fixes": [
            {
                "title": text.clean(fix.title),
                "changes": wording.changes(fix, cwd),
                "applied_by": wording.applied_by(fix),
                "gain": wording.gain(fix.gain) if fix.gain is not None and fix.gain != finding.gain else "",
            }
            for fix in finding.fixes
        ],
    }


def _times(analysis: Analysis) -> list[dict[str, Any]]:
    codes = wording.codes(analysis, palette.kind_of)
    return [{"kind": kind, "codes": codes.get(kind.name, [])} for kind in wording.kinds_of_time(analysis.time)]


def _budget(analysis: Analysis) -> list[dict[str, Any]]:
    total = sum(analysis.budget.values())
    codes = wording.codes(analysis, palette.part_of)
    return [
        {"look": palette.part(part), "ms": value, "share": 100 * value / total, "codes": codes.get(part, [])}
        for part, value in analysis.budget.items()
        if total > 0 and value >= palette.LEAST_SHARE * total
    ]


def _rank_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """One row a rank: how it ran and ended, its mean step and own work."""
    by_rank = analysis.budget_by_rank
    own = by_rank.drop(columns=[part for part in palette.WAITING if part in by_rank]).sum(axis=1)
    infos = {info.rank: info for info in analysis.run.ranks}
    exits = {item.rank: item for item in last_processes(analysis.run.exits)}
    blamed = _blamed(analysis)
    everyone = sorted({*by_rank.index, *infos, *exits, *analysis.ranks_captured, *wording.missing_ranks(analysis)})
    return [
        {
            "rank": rank,
            "info": infos.get(rank),
            "host": text.clean(item.host) if (item := infos.get(rank) or exits.get(rank)) else "",
            "ended": wording.ended(exits[rank]) if rank in exits else "",
            "failed": rank in exits and exits[rank].status != 0,
            "missing": rank not in analysis.ranks_captured,
            "blamed": rank == blamed,
            "own": own.get(rank),
            "parts": by_rank.loc[rank].to_dict() if rank in by_rank.index else None,
        }
        for rank in everyone
    ]


def _facts(analysis: Analysis) -> list[dict[str, str]]:
    """What the ranks said of themselves, those that said the same together."""
    alike: dict[str, list[int]] = {}
    for fact in analysis.run.facts:
        words = json.dumps({key: value for key, value in fact.items() if key != "rank"}, default=str)
        alike.setdefault(words, []).append(int(fact.get("rank", -1)))
    rows = []
    for words, ranks in list(alike.items())[:100]:
        fact = json.loads(words)
        name, site = fact.pop("fact", ""), fact.pop("site", "") or ""
        said = ", ".join(f"{key}={value}" for key, value in fact.items())
        rows.append({
            "fact": text.clean(name), "site": text.clean(site), "said": text.clean(said, 1000),
            "ranks": text.spans(ranks),
        })  # fmt: skip
    return rows
