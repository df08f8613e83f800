"""What an export says of its run, so that `dsprof import` can read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsprof.exported import EXPORT_SCHEMA

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis


def about_run(analysis: Analysis) -> dict[str, Any]:
    """Ranks, process groups and facts of the set-up, as run.json has them; no command line, folder or warning."""
    run = analysis.run
    return {
        "schema": EXPORT_SCHEMA, "name": run.name, "world_size": analysis.ranks_expected, "level": run.level,
        "engine": run.engine, "imported": run.imported, "versions": run.versions, "groups": run.groups,
        "facts": [fact for fact in run.facts if fact.get("fact") != "import"],
        "ranks": [{"rank": one.rank, "host": one.host, "native": one.native} for one in run.ranks],
    }  # fmt: skip
