"""Reports: each draws an `Analysis`; none computes a diagnosis of its own, and none knows another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsprof.atomic import write_atomically
from dsprof.run import RunFolder

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dsprof.analyzer.analysis import Analysis
    from dsprof.analyzer.study import Study
    from dsprof.analyzer.work.layer_costs import LayerCost
    from dsprof.trace.map_ranks import Observer


def measure(
    folder: RunFolder,
    jobs: int | None = None,
    observer: Observer | None = None,
    executor: Executor | None = None,
    own_process: bool = True,
) -> Study:
    """Load a run, merging it first where that is needed, and measure it: what what-ifs begin at. Raises RunError if it
    cannot be read.

    jobs: in how many processes; None: one for a small trace, one a core for a large one. The result is the same.
    observer: told of progress: what is done, for how many ranks it is done and how many there are.
    executor: does what is of one rank alone, in the place of processes of this machine.
    own_process: whether nothing else goes on in this process, such as training.
    """
    from dsprof import trace
    from dsprof.analyzer.freed_memory import large_apart
    from dsprof.analyzer.study import study
    from dsprof.trace.merge import size_of
    from dsprof.trace.process_pool import processes
    from dsprof.trace.strings import plain_strings

    if own_process:
        large_apart()
    with plain_strings(), ExitStack() as stack:
        if executor is None:
            ranks, traced_bytes = size_of(folder)
            executor = stack.enter_context(processes(jobs, traced_bytes, ranks))
        return study(trace.load(folder, executor, observer), executor, observer)


def examine(
    folder: RunFolder, jobs: int | None = None, observer: Observer | None = None, executor: Executor | None = None
) -> Analysis:
    """Load a run, merging it first where that is needed, and analyze it. Raises RunError if it cannot be read. `jobs`,
    `observer`, `executor`: as in `measure`."""
    return explain(measure(folder, jobs, observer, executor), folder)


def explain(study: Study, folder: RunFolder) -> Analysis:
    """What is found of a run that was measured, as `examine` gives it."""
    from dsprof.analyzer.analyze import explain
    from dsprof.trace.strings import plain_strings

    from .diffs import with_diffs

    with plain_strings():
        return with_diffs(explain(study), folder)


def finish(
    folder: RunFolder,
    *,
    report: bool = True,
    jobs: int | None = None,
    observer: Observer | None = None,
    executor: Executor | None = None,
) -> Analysis:
    """Analyze a run and write findings.json and, with `report`, report.html and tensorboard/ into its folder; of a
    pipeline of the engine layer_costs.json, too. `jobs`, `observer`, `executor`: as in `measure`.

    An output that cannot be written costs only itself: it becomes a warning of the Analysis returned.
    Raises RunError if the run cannot be read.
    """
    analysis = examine(folder, jobs, observer, executor)
    outputs: dict[str, Callable[[], None]] = {}
    if report:
        outputs["report.html"] = lambda: write_html(analysis, folder)
        outputs["tensorboard"] = lambda: write_tensorboard(analysis, folder)
    outputs["findings.json"] = lambda: write_findings(analysis, folder)
    if analysis.layer_costs:
        outputs["layer_costs.json"] = lambda: write_layer_costs(analysis.layer_costs, folder)
    failures = [failure for name, write in outputs.items() if (failure := _attempt(name, write)) is not None]
    if not failures:
        return analysis
    warnings = (*analysis.capture.warnings, *failures)
    return replace(analysis, capture=replace(analysis.capture, warnings=warnings))


def _attempt(name: str, write: Callable[[], None]) -> str | None:
    try:
        write()
    except OSError as error:
        why = error.strerror or error
        return f"{name}: not written ({why}); make room or fix the permissions, then `dsprof report`"
    except Exception as error:  # a bug in one report must not cost the others
        return f"{name}: not written ({type(error).__name__}: {error})"
    return None


def write_layer_costs(costs: Sequence[LayerCost], folder: RunFolder) -> None:
    """Write layer_costs.json, which the engine's `pipeline.layer_costs` takes."""
    import orjson

    write_atomically(folder.layer_costs_json, orjson.dumps({"layers": [*costs]}, option=orjson.OPT_INDENT_2))


def write_findings(analysis: Analysis, folder: RunFolder) -> None:
    """Write findings.json."""
    write_atomically(folder.findings_json, findings_json(analysis))


def write_html(analysis: Analysis, folder: RunFolder) -> None:
    """Write report.html."""
    from . import html

    write_atomically(folder.report_html, html.render(analysis))


def write_tensorboard(analysis: Analysis, folder: RunFolder) -> None:
    """Write tensorboard/."""
    from . import tensorboard

    tensorboard.write(analysis, folder.tensorboard)


def findings_json(analysis: Analysis) -> bytes:
    """The text of findings.json; what is not a finite number is null."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    content: bytes = orjson.dumps(analysis.to_dict(), default=_plain, option=options)
    return content


def _plain(value: Any) -> Any:
    """Scalars and paths from tables and facts, as JSON knows them."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
