"""Starts the real command line in a process of its own, with the analysis stubbed: these tests are not about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked_python

PROGRAM = """
import sys, time, types
def finish(folder, *, report=True):
    if folder.path.name.startswith("broken"):
        raise ValueError("cannot divide")
    if folder.path.name.startswith("slow"):
        print("analyzing", file=sys.stderr, flush=True)
        time.sleep(60)
    folder.findings_json.write_text('{\\n  "schema": 1\\n}')
    if report:
        folder.report_html.write_text("")
    return "analysis"
def render(analysis, file, *, color, width):
    print("THE VERDICT", file=file)
terminal = types.ModuleType("dsprof.reports.terminal")
terminal.render = render
wording = types.ModuleType("dsprof.reports.wording")
wording.next_commands = lambda analysis, run: [(f"dsprof fix {run}", "the change as a diff")]
reports = types.ModuleType("dsprof.reports")
reports.finish, reports.terminal, reports.wording = finish, terminal, wording
stubs = {"dsprof.reports": reports, "dsprof.reports.terminal": terminal, "dsprof.reports.wording": wording}
sys.modules.update(stubs)
import dsprof
dsprof.reports = reports  # it may be imported already, in the process that this one was forked from
from dsprof.cli import main
sys.exit(main())
"""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without anything that would steer dsprof or torchrun. Captures go into the run folder at once,
    and what other tests have left in memory is nobody's business here."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PET_", "TORCH"))}
    return {**own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "DSPROF_SCRATCH": "off",
            **(extra or {})}  # fmt: skip


def start(
    words: list[str], cwd: Path, env: Mapping[str, str] | None = None, forked: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """`dsprof WORDS` in a session of its own, both its streams piped. `forked`: it and torchrun's agent are forked from
    a process that has imported what they import; their ranks are interpreters of their own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, **options}
    # A test run in the background ignores SIGINT, one under nohup SIGHUP, and its children would inherit that.
    ours = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    command = [sys.executable, "-c", PROGRAM, *words]
    try:
        if forked:
            place = {forked_python.MODULES_ONLY: "1"}
            return forked_python.start(command, cwd=cwd, env={**clean_environment(env), **place}, **options)
        return subprocess.Popen(command, cwd=cwd, env=clean_environment(env), text=True, **options)
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def run(
    words: list[str], cwd: Path, env: Mapping[str, str] | None = None, forked: bool = False
) -> subprocess.CompletedProcess[str]:
    """`dsprof WORDS`, to its end."""
    process = start(words, cwd, env, forked)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, err)
