"""Does a pipeline take what is predicted of it? From one 1F1B run of layers that sleep: other schedules, numbers of
micro-batches and boundaries, each of which is then run.

    python benchmarks/structure.py                 # all; writes benchmarks/results/structure.json
    python benchmarks/structure.py --only torch    # cases whose name begins so

A case is written as soon as it has run, and a benchmark that was broken off goes on where it was. Of a larger batch the
step is predicted and measured whole. An error of the saving is of the measured one, and only where that is 5 % of the
step or more; `load` is how many threads wanted a core when the case had run.

On a busy machine a sleep takes longer than it was told to, and in one run more so than in another: `layers_took` is
what all layers took in the case's run, times what they took in the first. No prediction knows that beforehand; so
errors are given twice, the second time (`..._of_layers`) of what is predicted times `layers_took`. A run whose layers
slept more than 3 % too long is run again, up to three times, and the least disturbed counts, whatever is said of it.
`runs`, written by hand, says which cases were measured again, and what the run that they are not of gave.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402

from dsprof.analyzer.ask import ask  # noqa: E402
from dsprof.analyzer.stage_costs import stage_ms  # noqa: E402
from dsprof.analyzer.structure import AUTO, PipelineStructure, pipeline_that_ran, restructured  # noqa: E402
from dsprof.analyzer.study import Study, study  # noqa: E402
from dsprof.analyzer.work.stage_layers import stage_layers  # noqa: E402
from dsprof.atomic import write_atomically  # noqa: E402
from dsprof.trace import load  # noqa: E402

RESULTS: Final = HERE / "results" / "structure.json"
JOB: Final = HERE / "structure_job.py"
WORTH: Final = 0.05
"""Of the step: a smaller saving is not worth an error in percent."""

DISTURBED, ATTEMPTS = 0.03, 3


@dataclass(frozen=True)
class Setup:
    """What ran: `layer_ms` of every layer, by ranks of a pipeline."""

    framework: str
    ranks: int
    microbatches: int
    layer_ms: tuple[float, ...]

    def arguments(self, wanted: PipelineStructure, bounds: tuple[int, ...] | None) -> list[str]:
        chunks = wanted.chunks or (2 if wanted.schedule == "interleaved" else 1)
        count = wanted.microbatches or self.microbatches
        words: dict[str, Any] = {
            "--framework": self.framework, "--stages": self.ranks, "--schedule": wanted.schedule or "1f1b",
            "--chunks": chunks, "--micro-batches": count, "--steps": min(max(60 // count, 6), 12),
        }  # fmt: skip
        found = [str(word) for pair in words.items() for word in pair]
        found += ["--layer-ms", *map(str, self.layer_ms)]
        return found + (["--boundaries", *map(str, bounds)] if bounds else [])


SETUPS: Final = {
    "engine2": Setup("engine", 2, 6, (30, 42, 30, 30, 54, 30, 30, 30)),
    "engine4": Setup("engine", 4, 8, (30, 30, 48, 30, 30, 30, 30, 60)),
    "torch2": Setup("torch", 2, 6, (36, 36, 36, 36, 36, 36, 36, 36)),
}
CASES: Final = {
    "engine2": [
        PipelineStructure(schedule="gpipe"),
        PipelineStructure(schedule="zero-bubble"),
        PipelineStructure(schedule="interleaved"),
        PipelineStructure(microbatches=12),
        PipelineStructure(microbatches=3),
        PipelineStructure(boundaries=(0, 2, 8)),
        PipelineStructure(schedule="zero-bubble", microbatches=12, boundaries=AUTO),
    ],
    "engine4": [
        PipelineStructure(schedule="gpipe"),
        PipelineStructure(schedule="zero-bubble"),
        PipelineStructure(schedule="interleaved"),
        PipelineStructure(microbatches=12),
        PipelineStructure(boundaries=(0, 1, 3, 6, 8)),
    ],
    "torch2": [
        PipelineStructure(schedule="gpipe"),
        PipelineStructure(schedule="interleaved"),
        PipelineStructure(microbatches=12),
    ],
}


def run(setup: Setup, wanted: PipelineStructure, bounds: tuple[int, ...] | None) -> Study:
    """The study of a run of it, of the least disturbed of several."""
    told_ms, found = 3 * sum(setup.layer_ms), list[Study]()
    for _ in range(ATTEMPTS):
        found.append(_run_once(setup, wanted, bounds))
        if _layers_ms(found[-1]) <= (1 + DISTURBED) * told_ms:
            break
    return min(found, key=_layers_ms)


def _run_once(setup: Setup, wanted: PipelineStructure, bounds: tuple[int, ...] | None) -> Study:
    with tempfile.TemporaryDirectory() as folder:
        finished = profile(
            Path(folder), JOB, *setup.arguments(wanted, bounds), ranks=setup.ranks, flags=("--no-report",)
        )
        if finished.status:
            raise SystemExit(finished.stderr[-3000:])
        found = study(load(finished.folder))
        stage_layers(found)  # of the run folder, while that is there
        return found


def judged(base: Study, setup: Setup, wanted: PipelineStructure) -> dict[str, Any]:
    """Predict a case from the base, then run it."""
    (row,) = ask(base, [[wanted]]).rows
    bounds = restructured(base, wanted).boundaries if row.gain is not None else None
    if row.gain is None:
        return {"refused": row.reason}
    times = (wanted.microbatches or setup.microbatches) / setup.microbatches
    told, low, high = ((base.step_ms - saved) * times for saved in (row.gain.ms, row.gain.high, row.gain.low))
    ran = run(setup, wanted, bounds)
    plan = pipeline_that_ran(ran)
    measured, now = ran.step_ms, base.step_ms * times
    took = _layers_ms(ran) / _layers_ms(base)
    worth = abs(now * took - measured) >= WORTH * now
    return {
        "ran": plan.schedule, "now_ms": now, "predicted_ms": told, "low_ms": low, "high_ms": high,
        "measured_ms": measured, "step_error": told / measured - 1, "holds": bool(low <= measured <= high),
        "saving_error": (now - told) / (now - measured) - 1 if abs(now - measured) >= WORTH * now else None,
        "layers_took": took, "step_error_of_layers": told * took / measured - 1,
        "holds_of_layers": bool(low * took <= measured <= high * took),
        "saving_error_of_layers": (now - told) * took / (now * took - measured) - 1 if worth else None,
        "boundaries": bounds, "load": os.getloadavg()[0],
    }  # fmt: skip


def _layers_ms(ran: Study) -> float:
    """What all layers took for one micro-batch."""
    return sum(stage_ms(ran.need_graph()).values())


def summary(cases: dict[str, Any]) -> dict[str, Any]:
    done = [case for case in cases.values() if "measured_ms" in case]
    found: dict[str, Any] = {"cases": len(done)}
    for suffix in ("", "_of_layers"):
        savings = [abs(one) for case in done if (one := case[f"saving_error{suffix}"]) is not None]
        found |= {
            f"median_step_error{suffix}": float(np.median([abs(case[f"step_error{suffix}"]) for case in done] or [0])),
            f"median_saving_error{suffix}": float(np.median(savings)) if savings else None,
            f"savings{suffix}": len(savings),
            f"intervals_hold{suffix}": sum(case[f"holds{suffix}"] for case in done),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    earlier: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    cases: dict[str, Any] = earlier.get("of_cases", {})
    for name, setup in SETUPS.items():
        left = [one for one in CASES[name] if f"{name} {one.says}" not in cases]
        left = [one for one in left if f"{name} {one.says}".startswith(args.only)]
        if not left:
            continue
        base = run(setup, PipelineStructure(), None)
        for wanted in left:
            case = judged(base, setup, wanted)
            cases[f"{name} {wanted.says}"] = case
            print(name, wanted.says, json.dumps(case), flush=True)
            found = {**earlier, "summary": summary(cases), "of_cases": cases}
            write_atomically(args.results, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(summary(cases)))


if __name__ == "__main__":
    main()
