"""What one event costs the rank that records it: time, room in the capture, memory; and what arming costs.

    python benchmarks/events.py                   # about two minutes; writes benchmarks/results/events.json

An event is recorded in a tight loop, in processes of its own, the recorders taking turns: CPU time of the whole process
(the thread that prepares the next chunk included) less that of the empty loop, divided by the events; the median over
the rounds, and the quartiles beside it. Of hooks (a module's call; an all-reduce and its wait, which are two records)
it is the same loop with and without them; of what looks for the line that issues it, with and without that. Memory is
what is resident after as many events as fill several chunks, less what was before the recorder was opened. Arming is
timed as the CPU time, children included, of whole interpreters that run `pass` or `import torch`, or train for three
seconds, of which a whole capture is written; armed and not in turns: the difference of the medians, with its 95 %
interval by the bootstrap; where that holds 0, nothing was found. So is the most that was resident.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
EVENTS = 60_000
TRAINS = """
import time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
until = time.monotonic() + 3
for _ in range(100):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
time.sleep(max(0.0, until - time.monotonic()))  # the collectors' threads look at the host meanwhile
"""
PROGRAMS = {"pass": "pass", "import torch": "import torch", "training": TRAINS}
CHILD = """
import json, os, sys, time
from pathlib import Path
import torch
from dsprof import schema
from dsprof.schema import Kind
kind, folder, events = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def resident():
    fields = (line.split() for line in open("/proc/self/status"))
    return next(int(field[1]) for field in fields if field[0] == "VmRSS:")

before = resident()
if kind == "native":
    from dsprof.collectors import native
    helper = native.load(lambda why: sys.exit(why))
    recorder = helper.open(folder)
else:
    from dsprof.collectors.recorder.python_recorder import PyRecorder
    recorder = PyRecorder(folder)
name, mark, phase = recorder.intern("event"), int(Kind.MARK), int(Kind.PHASE)
put, begin, end, intern = recorder.put, recorder.begin, recorder.end, recorder.intern
group = recorder.group("0")

def empty():
    for number in range(events):
        pass
def one_put():
    for number in range(events):
        put(mark, name, 1, 2)
def begin_and_end():
    for number in range(events):
        end(begin(phase, name))
def collective():
    for number in range(events):
        recorder.comm(4, name, 1, 2, 1, 4096, group, number, -1, 3, 0, -1, -1, 0, 0)
def known_name():
    for number in range(events):
        intern("event")

def cpu_ns(loop):
    began = time.process_time_ns()
    loop()
    return time.process_time_ns() - began

for loop in (empty, one_put, begin_and_end, collective, known_name):
    loop()
nothing = cpu_ns(empty)
taken = {loop.__name__: (cpu_ns(loop) - nothing) / events for loop in (one_put, begin_and_end, collective, known_name)}
after = resident()

import torch.distributed as dist
from dsprof.collectors.communication import call_sites
from dsprof.collectors.communication import collectives
from dsprof.collectors.loop import modules
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.hooking.uninstall import in_reverse
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer, value = torch.nn.Identity(), torch.ones(2)

def calls():
    for number in range(events // 4):
        layer(value)
def reductions():
    for number in range(events // 30):
        dist.all_reduce(value, async_op=True).wait()

def added(loop, count, install):
    loop()
    plain = cpu_ns(loop)
    uninstall = install()
    loop()
    found = (cpu_ns(loop) - plain) / count
    uninstall()
    return found
def sites(level):
    capture = OpenCapture(recorder, folder, level, lambda: True, lambda: None, lambda fact: None)
    return in_reverse(call_sites.install(capture))

taken["hook_of_a_module"] = added(calls, events // 4, lambda: modules.watch(recorder))
taken["hooks_of_an_all_reduce"] = added(reductions, events // 30, lambda: collectives.watch(recorder))
uninstall = collectives.watch(recorder)
for level in ("light", "full"):
    taken[f"line_of_an_all_reduce_at_{level}"] = added(reductions, events // 30, lambda: sites(level))
uninstall()
dist.destroy_process_group()
written = recorder.records
size = sum(path.stat().st_size for path in folder.glob("chunk-*.bin"))
print(json.dumps({"ns": taken, "resident_kib": after - before, "bytes_an_event": size / written,
                  "dropped": recorder.dropped, "errors": recorder.errors}))
"""


def events(kind: str) -> dict[str, Any]:
    """One round of one recorder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, kind, folder, str(EVENTS)]
        output = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output)
    assert (found["dropped"], found["errors"]) == (0, 0), found
    return found


def interpreter(program: str, armed: bool) -> tuple[float, float]:
    """CPU time of a whole interpreter, ms, and the most that was resident, MB."""
    with tempfile.TemporaryDirectory() as folder:
        ours = {"DSPROF": "1", "DSPROF_RUN": folder, "DSPROF_NATIVE": "1"} if armed else {}
        env = environment(**ours)
        if armed:
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "collectors" / "bootstrap"), env["PYTHONPATH"]])
        child = subprocess.Popen([sys.executable, "-c", program], env=env)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return 1e3 * (usage.ru_utime + usage.ru_stime), usage.ru_maxrss * 1024 / 1e6


def environment(**ours: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
    return {**kept, "PYTHONPATH": str(ROOT), **ours}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)], "worst": round(max(values), 1)}  # type: ignore[dict-item]


def difference(what: str, plain: list[float], armed: list[float]) -> dict[str, Any]:
    draw = random.Random(0)

    def again(values: list[float]) -> float:
        return statistics.median(draw.choices(values, k=len(values)))

    drawn = sorted(again(armed) - again(plain) for _ in range(4000))
    middle = statistics.median(armed) - statistics.median(plain)
    return {
        f"plain_{what}": round(statistics.median(plain), 1),
        f"added_{what}": round(middle, 2),
        "interval_95": [round(drawn[100], 2), round(drawn[-101], 2)],
        "found": not drawn[100] <= 0 <= drawn[-101],
    }


def in_turns(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    order = random.Random(0)
    found: dict[str, list[Any]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in order.sample(list(arms), len(arms)):
            found[arm].append(arms[arm]())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--imports", type=int, default=7, help="rounds of programs; of `pass` five times as many")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "events.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = in_turns({"native": lambda: events("native"), "python": lambda: events("python")}, args.rounds)
    arming = {}
    for name, program in PROGRAMS.items():
        arms = {str(armed): lambda p=program, a=armed: interpreter(p, a) for armed in (False, True)}
        taken = in_turns(arms, 5 * args.imports if name == "pass" else args.imports)  # type: ignore[arg-type]
        arming[name] = {
            what: difference(what, [one[at] for one in taken["False"]], [one[at] for one in taken["True"]])
            for at, what in enumerate(("cpu_ms", "resident_mb"))
        }
    result = {
        "what": "cost of an event in a tight loop: CPU ns of the process, less the empty loop; median, quartiles and "
        "worst of the rounds. arming: CPU ms and peak resident MB of a whole interpreter, armed less not",
        "recorders": {
            kind: {
                "ns": {what: spread([one["ns"][what] for one in found]) for what in found[0]["ns"]},
                "bytes_an_event": round(statistics.median(one["bytes_an_event"] for one in found), 2),
                "resident_kib": spread([float(one["resident_kib"]) for one in found]),
            }
            for kind, found in rounds.items()
        },
        "arming": arming,
        "of_these": "bytes_an_event is the size of the chunk files by the events in them: a record is 64 bytes, the "
        "rest is header pages and what is reserved for the next records. An import of torch varies by more than dsprof "
        "takes: results/arming.json has the entry point by itself",
        "events": EVENTS,
        "rounds": args.rounds,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": round(load, 1)},
        "noise": "the machine was shared with other work (see load_before): CPU time is what the caches and the other "
        "hyperthread leave of it, and differs by the quartiles from round to round",
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
