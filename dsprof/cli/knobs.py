"""`dsprof knobs`: what `dsprof run --set` can turn, and what it is now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dsprof.knobs import KNOBS, Knob, Stated
from dsprof.knobs.json_config import of_config

from .runs import find_run

MOST_SHOWN: Final = 3
"""Values of one knob that are shown: a job may have many loaders."""


def command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", show_default=False, help="A run, to see what each knob was in it."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="As JSON, on stdout.")] = False,
) -> int:
    """List what `dsprof run --set KEY=VALUE` can turn; of a run, what it was and where that is written.

    Beside these, --set takes every key of a JSON configuration of DeepSpeed or of dsprof's engine, such as
    zero_optimization.reduce_bucket_size=5e7.
    """
    facts = None if run is None else _facts(run)
    rows = [(knob, None if facts is None else knob.stated(facts)) for knob in (*KNOBS, *of_config(facts or {}))]
    if as_json:
        print(json.dumps([_as_json(knob, stated) for knob, stated in rows]))
        return 0
    for knob, stated in rows:
        if stated is None or stated:
            print(f"{knob.key}  {_what(knob, stated)}")
    if run is not None and not any(stated for _, stated in rows):
        print("this run states none: it has no DistributedDataParallel, DataLoader, pipeline or configuration")
    return 0


def _facts(run: Path) -> dict[str, list[dict[str, Any]]]:
    from dsprof.trace import load

    return load(find_run(run)).run.facts_by_kind()


def _what(knob: Knob, stated: list[Stated] | None) -> str:
    if stated is None:
        unit = f", {knob.unit}" if knob.unit else ""
        return f"({knob.values}{unit}; {knob.numbers})\n    {knob.says}"
    shown = [f"{json.dumps(one.value)}" + (f" ({one.where})" if one.where else "") for one in stated[:MOST_SHOWN]]
    more = f", and {len(stated) - MOST_SHOWN} more" if len(stated) > MOST_SHOWN else ""
    return "= " + ", ".join(shown) + more


def _as_json(knob: Knob, stated: list[Stated] | None) -> dict[str, Any]:
    known = None if stated is None else [{"value": one.value, "where": one.where} for one in stated]
    return {
        "key": knob.key, "says": knob.says, "values": str(knob.values), "unit": knob.unit, "numbers": knob.numbers,
        "of": knob.of, "stated": known,
    }  # fmt: skip
