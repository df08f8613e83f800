"""Are faults of public bug reports found in jobs that the reports are not about? 42 variants of seven faults.

    python benchmarks/reported_variants.py            # 20 minutes; writes benchmarks/results/reported_variants.json
    python benchmarks/reported_variants.py --again    # those that went wrong, once more; what was said is kept beside
    python benchmarks/reported_variants.py --list     # what is drawn; runs nothing

The faults are those of `reported_cases.py`, each in six jobs of `reported_variant_job.py`: how large it is, which
rank it is of, how many ranks there are and in which framework are drawn from a seed. `right`: the first finding above
`info` has the fault's code, and names the rank, where it is of one; `right_fix`: one of that finding's fixes is what
mends it there. Written after each job; what was broken off goes on. `load_before` is how many threads wanted a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402

SEED: Final = 33
VARIANTS: Final = 6
"""Of each fault. The last three were drawn when what the first had shown was mended."""
SCRIPT: Final = HERE / "reported_variant_job.py"
RESULTS: Final = HERE / "results" / "reported_variants.json"


@dataclass(frozen=True)
class Kind:
    """A fault. fixes: by framework, words of which one is in a fix of the first finding; ranks: how many there may be;
    of_one: it is of one rank, which the finding has to name"""

    code: str
    fixes: dict[str, tuple[str, ...]]
    ranks: tuple[int, ...]
    sizes: tuple[float, float] = (0.8, 1.6)
    of_one: bool = False


def everywhere(*words: str, frameworks: tuple[str, ...] = ("ddp", "fsdp2", "engine", "deepspeed")) -> dict[str, Any]:
    return dict.fromkeys(frameworks, words)


REDUCTIONS: Final = ("stage", "gradient_accumulation_steps")
KINDS: Final = {
    "buffers": Kind(
        "comm.buffers", {"ddp": ("broadcast_buffers=False",), "trainer": ("ddp_broadcast_buffers",)}, (2, 3)
    ),
    "groups": Kind("compute.optimizer", everywhere("group", frameworks=("ddp", "fsdp2", "engine")), (2,), (1.0, 1.6)),
    "accumulation": Kind(
        "comm.redundant-reduce",
        {"ddp": ("no_sync",), "fsdp2": ("set_requires_gradient_sync",), "engine": REDUCTIONS, "deepspeed": REDUCTIONS},
        (2, 3),
    ),
    "tokens": Kind("data.imbalance", everywhere("squared lengths"), (2, 3, 4)),
    "compilation": Kind("compute.recompile", everywhere("dynamic"), (2, 3), of_one=True),
    "throttled": Kind("rank.straggler", everywhere("CPU limit"), (2, 3, 4), (0.7, 1.4), of_one=True),
    "shards": Kind("data.imbalance", everywhere("zigzag", frameworks=("ddp", "fsdp2", "engine")), (2, 3, 4)),
}


@dataclass(frozen=True)
class Variant:
    case: str
    framework: str
    ranks: int
    size: float
    place: int

    @property
    def words(self) -> tuple[str, ...]:
        return (
            "--case", self.case, "--framework", self.framework, "--size", str(self.size), "--place", str(self.place)
        )  # fmt: skip


def variants(seed: int = SEED) -> dict[str, Variant]:
    """By name; of each kind as many frameworks as it has, before one comes a second time."""
    found: dict[str, Variant] = {}
    orders = {
        case: random.Random(f"{seed} {case}").sample(sorted(kind.fixes), len(kind.fixes))
        for case, kind in KINDS.items()
    }
    for number in range(VARIANTS):
        for case, kind in KINDS.items():
            draw = random.Random(f"{seed} {case} {number}")
            framework, ranks = orders[case][number % len(orders[case])], draw.choice(kind.ranks)
            variant = Variant(case, framework, ranks, round(draw.uniform(*kind.sizes), 2), draw.randrange(ranks))
            found[f"{case} {number}"] = variant
    return found


def run(variant: Variant) -> dict[str, Any]:
    """What is said of a job, and whether that is right."""
    told: dict[str, Any] = {"job": f"{variant.ranks} ranks, {' '.join(variant.words)}"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = profile(
                Path(folder), SCRIPT, *variant.words, ranks=variant.ranks, flags=("--no-report",), fresh=True,
                variables={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return told | {"failed": str(error)}
        if done.status != 0:
            return told | {"failed": done.stderr[-2000:]}
        found = done.findings
    above = [item for item in found["findings"] if item["severity"] != "info"]
    first, kind = above[0] if above else None, KINDS[variant.case]
    right = first is not None and first["code"] == kind.code
    right = right and (not kind.of_one or first["where"].get("ranks") == [variant.place])
    fixes = " ".join(fix["title"] for fix in first["fixes"]) if first else ""
    return told | {
        "step_ms": found["run"]["step_ms"] and round(found["run"]["step_ms"]["mean"], 2),
        "headline": found["verdict"]["headline"], "said": [item["code"] for item in above],
        "not_judged": found["not_judged"].get(kind.code),
        "first": first and {"title": first["title"], "ranks": first["where"].get("ranks"), "gain": first["gain"]},
        "fixes": [fix["title"] for fix in first["fixes"]] if first else [],
        "true": kind.code, "right": right,
        "right_fix": right and any(word in fixes for word in kind.fixes[variant.framework]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the variants whose names begin so; all, if none is given")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    drawn = variants()
    if args.list:
        for name, variant in drawn.items():
            print(f"{name:16s} {variant.ranks} ranks, {variant.framework}, {variant.size} times, place {variant.place}")
        return 0
    done: dict[str, Any] = json.loads(args.output.read_text())["each"] if args.output.exists() else {}
    for name, variant in drawn.items():
        before = done.get(name)
        if args.names and not name.startswith(tuple(args.names)):
            continue
        if before is not None and not (args.again and not before.get("right_fix")):
            continue
        load = os.getloadavg()[0]
        done[name] = {**run(variant), "load_before": round(load, 1)}
        if before is not None:
            done[name]["before"] = before
        print(name, json.dumps({key: done[name].get(key) for key in ("right", "right_fix", "said")}), flush=True)
        result = {
            "what": "what `dsprof run` says of jobs with faults of public bug reports, drawn from a seed",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "seed": SEED,
            "right": f"{sum(bool(one.get('right')) for one in done.values())} of {len(done)}",
            "right_fix": f"{sum(bool(one.get('right_fix')) for one in done.values())} of {len(done)}",
            "right_fix_in_the_first_try": f"{sum(bool(first_try(one).get('right_fix')) for one in done.values())}"
            f" of {len(done)}",
            "each": done,
        }
        write_atomically(args.output, json.dumps(result, indent=1) + "\n")
    return 0


def first_try(one: dict[str, Any]) -> dict[str, Any]:
    while "before" in one:
        one = one["before"]
    return one


if __name__ == "__main__":
    sys.exit(main())
