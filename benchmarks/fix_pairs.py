"""Faults and what `dsprof fix --verify` makes of them: what is predicted, written before the verifying jobs run,
against what they measure.

    python benchmarks/fix_pairs.py                     # all; writes benchmarks/results/fix_pairs.json
    python benchmarks/fix_pairs.py NAME ...            # those whose names begin so
    python benchmarks/fix_pairs.py --again NAME ...    # once more: what was there is kept beside it, as `before`
    python benchmarks/fix_pairs.py --summary           # runs nothing
    python benchmarks/fix_pairs.py --slow-link         # others, over a slow link (root); results/slow_links.json

Each pair of `fix_cases.py` is run as a user would: `dsprof run` of a job with one fault, and `dsprof fix RUN --set ...
--verify` of the change that its finding offers, or of one that `dsprof whatif` predicts. Nothing is changed by hand.
The result is written when a change is predicted, and again when it is measured; what was broken off goes on there.
`load` is how many threads wanted a core, of which there are `cores`.

All processes are forked from one that has imported torch (tests/forked_python.py), but for ranks on the device that
sleeps: of a pair, which is seven jobs, importing it would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fix_cases import CASES, FRESH, LINKED, RATE, STEPS, Case
from forked_dsprof import Failed, dsprof, end_all

from dsprof.atomic import write_atomically
from dsprof.fix import proposals
from dsprof.knobs.registry import flags

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results" / "fix_pairs.json"
SLOW_LINKS: Final = HERE / "results" / "slow_links.json"
IN_NAMESPACE: Final = "FIX_PAIRS_IN_NAMESPACE"
SHAPE: Final = (
    f'ip link set lo mtu 4000 up && tc qdisc add dev lo root tbf rate {RATE} burst 32kb latency 2s && exec "$@"'
)
"""In a new network namespace: its loopback moves so much and no more."""
JOBS: Final = HERE / "prediction_jobs"
PAIRS: Final = 3
EFFECT: Final = 0.05
"""Of the step: effects above have a sign."""
GAIN: Final = 0.1

Record = dict[str, Any]


def predicted(case: Case, where: Path) -> Record:
    """The faulty job, profiled once, and what its change is to save, ms a step. Raises Failed."""
    words = [str(JOBS / case.script), *case.args.split()]
    if not case.device:
        words += STEPS.split()
    if case.config is not None:
        (where / "ds.json").write_text(json.dumps(case.config, indent=2) + "\n")
        words += ["--deepspeed_config", str(where / "ds.json")]
    ranks = ["--nproc-per-node", str(case.ranks)]
    done = dsprof(where, "run", "-o", "run", "--force", "--no-report", "-q", *ranks, *words, device=case.device)
    if done.returncode:
        raise Failed(f"the job ended with status {done.returncode}: {done.stderr[-600:]}")
    found = json.loads((where / "run" / "findings.json").read_text())
    if found["run"]["step_ms"] is None:
        raise Failed(f"no step is ordinary: {found['verdict']['headline']}")
    record: Record = {
        "step_ms": round(found["run"]["step_ms"]["mean"], 2),
        "found": [one["code"] for one in found["findings"]],
        "headline": found["verdict"]["headline"],
    }
    offered = [one for one in proposals(found) if one.code == case.code and one.gain]
    if offered and not case.asked:
        return {**record, "set": dict(offered[0].knobs), "by": "its finding", "predicted": _gain(offered[0].gain)}
    record |= {"set": dict(case.change), "by": "whatif"}
    done = dsprof(where, "whatif", "run", *flags(case.change.items()), "--json", device=case.device)
    try:
        row = json.loads(done.stdout)["answers"][-1]
    except ValueError:
        return {**record, "not_predicted": done.stderr[-600:]}
    if row["saved"] is None:
        return {**record, "not_predicted": row["reason"]}
    return {**record, "predicted": _gain(row["saved"]), "notes": row["notes"]}


def _gain(gain: Any) -> Record:
    return {name: round(float(gain[name]), 3) for name in ("ms", "low", "high")} | {"method": gain["method"]}


def measured(case: Case, where: Path, change: dict[str, Any]) -> Record:
    """What `dsprof fix --verify` measures of a change."""
    turned = flags(change.items())
    done = dsprof(where, "fix", "run", *turned, "--verify", "--pairs", str(PAIRS), "--json", device=case.device)
    try:
        found: Record = json.loads(done.stdout)["measured"]
    except ValueError:
        return {"outcome": "undecided", "why": f"status {done.returncode}: {done.stderr[-600:]}"}
    if found["outcome"] == "withdrawn" and "ms" not in found:
        found["said"] = done.stderr[-600:]
    return found


def judged(record: Record) -> Record:
    """What is made of a pair; empty: it was not measured. Percents: of the saving, but for `gain_percent`."""
    found, said = record.get("measured", {}), record.get("predicted")
    if "ms" not in found:
        return {}
    saving = found["ms"]
    now = statistics.fmean(pair[0] for pair in found["pairs"])
    result: Record = {"gain_percent": round(100 * saving / now, 1)}
    if said is None:
        return {**result, "holds": False}
    whole = abs(saving)
    if whole > 0:
        result["error_percent"] = round(100 * abs(said["ms"] - saving) / whole, 1)
        result["width_percent"] = round(100 * (said["high"] - said["low"]) / whole, 1)
    if abs(saving) > EFFECT * now:
        result["right_sign"] = said["ms"] * saving > 0
    return {**result, "holds": bool(said["low"] <= saving <= said["high"])}


def summary(records: Iterable[Record]) -> Record:
    """Over pairs that were measured; one whose saving was not predicted holds none, and its error is the saving."""
    scored = [one for record in records if (one := judged(record))]
    signs = [one["right_sign"] for one in scored if "right_sign" in one]
    return {
        "measured": len(scored),
        "predicted": sum("error_percent" in one for one in scored),
        "holds": sum(one["holds"] for one in scored),
        "median_error_percent": _median(one.get("error_percent", 100.0) for one in scored),
        "median_width_percent": _median(one["width_percent"] for one in scored if "width_percent" in one),
        "right_sign": f"{sum(signs)} of {len(signs)} whose effect is above {100 * EFFECT:g} % of the step",
        "gain_over_10_percent": sum(one["gain_percent"] > 100 * GAIN for one in scored),
    }


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return round(statistics.median(listed), 1) if listed else None


def result(records: list[Record], cases: Sequence[Case] = CASES) -> Record:
    """The file: the summaries of all pairs, of those that were chosen before any ran, and each pair."""
    fresh = {case.name for case in FRESH}
    failed = [record["name"] for record in records if "why" in record or "why" in record.get("measured", {})]
    return {
        "what": "the saving of a change as predicted by one run, against what `dsprof fix --verify` measures of it",
        "cores": os.cpu_count(),
        "summary": {
            "all": summary(records),
            "chosen_before_any_ran": summary(record for record in records if record["name"] in fresh),
            "left": len(cases) - len({record["name"] for record in records if "measured" in record}),
        },
        "not_decided_or_failed": failed,
        "pairs": [{**record, "judged": judged(record)} for record in records],
    }


def over_slow_link() -> None:
    """Begin this program anew in a network namespace of its own. Ends it where that is not allowed."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        sys.exit("a network namespace of its own is not allowed here: run as root")
    line = ["unshare", "--net", "sh", "-c", SHAPE, "sh", sys.executable, *sys.argv]
    os.execvpe(line[0], line, {**os.environ, IN_NAMESPACE: "1"})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument("names", nargs="*", help="how the names of pairs begin; default: all")
    arguments.add_argument("--again", action="store_true", help="also those that were measured")
    arguments.add_argument("--note", default="", help="with --again: what was mended since, for the result")
    arguments.add_argument("--summary", action="store_true", help="run nothing")
    arguments.add_argument("--until", default="", metavar="HH:MM", help="begin no pair after that")
    arguments.add_argument("--slow-link", action="store_true", help="in a network namespace whose loopback is slow")
    arguments.add_argument("--results", type=Path)
    arguments.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dsprof-fix-pairs")
    options = arguments.parse_args()
    if options.slow_link and IN_NAMESPACE not in os.environ:
        over_slow_link()
    cases = LINKED if options.slow_link else CASES
    options.results = options.results or (SLOW_LINKS if options.slow_link else RESULTS)
    records: list[Record] = json.loads(options.results.read_text())["pairs"] if options.results.exists() else []

    def write() -> None:
        order = {case.name: place for place, case in enumerate(cases)}
        records.sort(key=lambda record: order.get(record["name"], len(order)))
        write_atomically(options.results, json.dumps(result(records, cases), indent=1) + "\n")

    if options.summary:
        write()
        print(json.dumps(result(records, cases)["summary"], indent=1))
        return
    try:
        for case in cases:
            if options.names and not any(case.name.startswith(name) for name in options.names):
                continue
            if options.until and time.strftime("%H:%M") >= options.until:
                break
            known = next((one for one in records if one["name"] == case.name), None)
            if known is not None and ("measured" in known or "why" in known):
                if not options.again:
                    continue
                records.remove(known)
                known = {"name": case.name, "before": known, **({"mended": options.note} if options.note else {})}
                records.append(known)
            known = _run(case, known, records, options.work, write)
            print(json.dumps({name: of for name, of in known.items() if name not in ("before", "found")}), flush=True)
    finally:
        end_all()


def _run(case: Case, known: Record | None, records: list[Record], work: Path, write: Any) -> Record:
    """A pair, from where it was broken off."""
    where = work / "".join(letter if letter.isalnum() else "-" for letter in case.name)
    where.mkdir(parents=True, exist_ok=True)
    if known is None:
        known = {"name": case.name}
        records.append(known)
    if "set" not in known or not (where / "run").exists():  # predicted, but its run is no longer there: once more
        for name in ("set", "by", "predicted", "not_predicted", "notes"):
            known.pop(name, None)
        known |= {"family": case.family, "job": f"{case.script} {case.args}", "ranks": case.ranks}
        known |= {"load": [round(os.getloadavg()[0], 1)]}
        _forget(where)
        try:
            known |= predicted(case, where)
        except Failed as failed:
            known["why"] = str(failed)
        write()  # what is predicted, before it is measured
    if known.get("set"):
        began = time.monotonic()
        try:
            known["measured"] = measured(case, where, known["set"])
        except Failed as failed:
            known["measured"] = {"outcome": "undecided", "why": str(failed)}
        known["verified_in_s"] = round(time.monotonic() - began)
        known["load"].append(round(os.getloadavg()[0], 1))
    write()
    return known


def _forget(where: Path) -> None:
    """Trials of an earlier run of the pair: a verification would go on with them."""
    for path in where.glob("run-fix-*"):
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
