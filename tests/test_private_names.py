"""Private names of torch and of frameworks: the table has all that the collectors use, and each may be gone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from captures import build_helper, read_rows
from jobs import environment

from dsprof.analyzer.rules.missing_collectors import EVERYTHING, reasons
from dsprof.collectors.catalogue import COLLECTORS
from dsprof.collectors.hooking import hook_parts, private, statements
from dsprof.collectors.hooking.hook_parts import HookPart, install_each
from dsprof.collectors.hooking.private_names import CUDA, NAMES
from dsprof.run import RunFolder
from dsprof.trace.merge import merge

HOME: Final = Path(__file__).parents[1] / "dsprof" / "collectors"
TABLE: Final = ("private_names.py", "private.py")
SOURCES: Final = {
    str(path.relative_to(HOME)): path.read_text() for path in sorted(HOME.rglob("*.py")) if path.name not in TABLE
}

# --- the table is complete ----------------------------------------------------------------------

NOT_OF_TORCH: Final = {
    "_dsprof": "set by dsprof on its own wrappers",
    "_dsprof_number": "set by dsprof on loaders",
    "_dsprof_class": "set by dsprof on the classes of modules that wait for their unit",
    "_composable": "part of a module's name from which scripts import fully_shard, which is hooked where it is there",
    "_lock": "dsprof's own attribute, by name",
    "_making": "dsprof's own attribute, by name",
    "_GLIBCXX_USE_CXX11_ABI": "of the C++ compiler",
    "_children": "of multiprocessing, of Python",
    "_getframe": "of sys, of Python",
    "_current_frames": "of sys, of Python",
    "_exit": "of os, of Python",
    "_initializing": "of module specs, of Python",
    "_is_gil_enabled": "of sys, of Python",
    "_replace": "of named tuples, of Python",
    "_symmetric_memory": "a module by which frames are passed over, where they are there",
    "_fsdp_wrapped_module": "part of a module's name, which is left out of it where it is there",
    "_orig_mod": "part of a module's name, which is left out of it where it is there",
    "_checkpoint_wrapped_module": "part of a module's name, which is left out of it where it is there",
}
TORCH: Final = {"torch", "dist", "distributed", "c10d", "deepspeed"}
"""Names that sources have for modules of torch and of frameworks."""
LISTED: Final = {part for one in NAMES for part in re.split("[.:]", one.path) if part.startswith("_")}


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name: private attributes of what is no object of the source's own, private names in texts, and private
    modules and names that are imported."""
    tree = ast.parse(source)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _of_self(node)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _root(node) in TORCH or node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for name in re.findall(r"(?:^|(?<=[.:]))_[A-Za-z]\w+", node.value):
                if _is_private(name) and " " not in node.value:
                    yield node.lineno, name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                if _is_private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((node.lineno, part) for part in alias.name.split(".") if _is_private(part))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and isinstance(node.ctx, ast.Store)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("file", SOURCES)
def test_a_private_name_is_in_the_table(file: str) -> None:
    own = {name for text in SOURCES.values() for name in re.findall(r"self\.(_\w+)|def (_\w+)|^(_\w+)", text, re.M)
           for name in name if name}  # fmt: skip
    unlisted = [
        f"{file}:{line}: {name}"
        for line, name in private_names(SOURCES[file])
        if name not in LISTED and name not in NOT_OF_TORCH and not (name in own and not _names_torch(file, line))
    ]
    assert unlisted == []


def _names_torch(file: str, line: int) -> bool:
    return re.search(r"\b(torch|dist|c10d|distributed)\.", SOURCES[file].splitlines()[line - 1]) is not None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch._C._new_name()", ["_C", "_new_name"]),
        (
            "import torch\ndef f(loader):\n    return loader._IterableDataset_len_called",
            ["_IterableDataset_len_called"],
        ),
        ("getattr(module, '_new_name', None)", ["_new_name"]),
        ("from torch._C import Future, _new", ["_C", "_new"]),
        ("import torch._new.module", ["_new"]),
        ("when_imported('torch._new.module', hook)", ["_new"]),
        ("class A:\n    def f(self):\n        self._own = 1\n        return self._own", []),
        ("'A text about torch._new, for people'", []),
    ],
)
def test_what_is_found_in_a_source(source: str, found: list[str]) -> None:
    assert sorted(name for _, name in private_names(source)) == sorted(found)


def test_each_name_of_the_table_is_used_by_its_collectors() -> None:
    text = "\n".join(SOURCES.values())
    for one in NAMES:
        assert re.search(rf"\b{one.path.replace(':', '.').rpartition('.')[2]}\b", text), one.path
        assert set(one.collectors) <= {*COLLECTORS, "arming"}, one.path
        assert one.lost
        assert one.lost[0] == one.lost[0].lower() or one.lost.startswith(("FSDP", "DeepSpeed", "Lightning"))
    assert len({one.path for one in NAMES}) == len(NAMES)


def test_this_torch_has_them_all() -> None:
    assert [one.path for one in private.gone()] == []


# --- each is taken away -------------------------------------------------------------------------

OF_TORCH: Final = [one for one in NAMES if one.package == "torch" and one.build != CUDA and "cuda" not in one.path]
JOB_OF: Final = {
    "pipelining": "pipeline",
    "sharding": "fsdp2",
    "compilation": "compiled",
    "_handle": "fsdp1",
    "_numels": "fsdp1",
    "_local_tensor": "fsdp2",
    "deep": "alone",
    "_get_tracing_state": "alone",
}
"""Last part of a path, or its first collector -> the job that uses it; else `loop`."""
COSTS: Final = {
    "torch.autograd:_engine_run_backward": {"PHASE:backward"},
    "torch.utils.data.dataloader:_BaseDataLoaderIter": {"PHASE:data"},
    "torch._dynamo.callback:callback_handler": {"PHASE:compile"},
    "torch._C:_current_graph_task_id": {"PHASE:recompute", "MARK:backward_done"},
    "torch.autograd:Variable._execution_engine": {"MARK:backward_done"},
    "torch._C:Future": {"WAIT:all_reduce"},
    "torch.distributed.pipelining.stage:_PipelineStageBase": {"PIPE:F", "PIPE:B"},
    "torch.distributed.pipelining.stage:_PipelineStageBase.forward_one_chunk": {"PIPE:F"},
    "torch.distributed.pipelining.stage:_PipelineStageBase.backward_one_chunk": {"PIPE:B"},
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": {"MODULE:FSDP::sharding"},
    "torch.distributed:_broadcast_coalesced": {"WAIT:broadcast"},
    "torch._C:_get_tracing_state": {"GAUGE:samples", "GAUGE:tokens"},
}
"""Path -> rows that a capture may then lack. Of all others no kind of row is lost but those of `ROWS_OF`."""
ROWS_OF: Final = {
    "without the native helper, collectives are not recorded": {
        "COMM:",
        "WAIT:",
        "MARK:backward_done",
        "MARK:call_site",
    },
    "waits for functional collectives": {"WAIT:"},
    "what memory is for": {"MEM:"},
    "of DDP": {"WAIT:"},
    "--deep profiles nothing": {"MARK:torch.profiler"},
    "without the native helper, which collective a wait_tensor": {"WAIT:"},
}


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    out: dict[str, Any]
    rows: frozenset[str]
    facts: list[dict[str, Any]]
    errors: list[str]
    folder: Path

    @property
    def lost(self) -> set[tuple[str, str]]:
        return {(fact["because"], fact["what"]) for fact in self.facts if fact["fact"] == "lost"}


def job_of(path: str) -> str:
    one = next(one for one in NAMES if one.path == path)
    if "ScheduleMulti" in path:
        return "pipelines"
    return JOB_OF.get(path.rpartition(".")[2].rpartition(":")[2], JOB_OF.get(one.collectors[0], "loop"))


def settings_of(path: str) -> dict[str, str]:
    one = next(one for one in NAMES if one.path == path)
    return (
        {"DSPROF_DEEP": "1:2"} if one.collectors == ("deep",) else {"DSPROF_LEVEL": "full"} if "tracing" in path else {}
    )


def run(folder: Path, cases: dict[str, tuple[str, list[str], dict[str, str]]], native: str = "0") -> dict[str, Outcome]:
    """Name -> job, names that are taken away, more settings. `plain-JOB` is not armed."""
    asked = []
    for number, (case, (job, hidden, more)) in enumerate(cases.items()):
        place = folder / str(number)
        armed = {"DSPROF": "1", "DSPROF_RUN": str(place / "run"), "DSPROF_NATIVE": native, **more}
        asked.append([str(place), job, hidden, {} if case.startswith("plain-") else armed])
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("private_names_job.py")), str(folder / "cases.json")],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {case: outcome(Path(place)) for case, (place, *_) in zip(cases, asked, strict=True)}


def outcome(folder: Path) -> Outcome:
    path = folder / "out.json"
    out = json.loads(path.read_text()) if path.exists() else {"raised": "the process died"}
    captures = sorted((folder / "run" / "capture").glob("*")) if (folder / "run").exists() else []
    rows = {f"{row.kind.name}:{row.name}" for capture in captures for row in read_rows(capture)}
    facts = [json.loads(line) for one in captures for line in (one / "facts.jsonl").read_text().splitlines()]
    errors = [error for one in captures for error in json.loads((one / "meta.json").read_text())["errors"]]
    return Outcome(out, frozenset(rows), facts, errors, folder / "run")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Each job plain and armed, and armed without each name of torch."""
    cases: dict[str, tuple[str, list[str], dict[str, str]]] = {}
    for one in OF_TORCH:
        job, more = job_of(one.path), settings_of(one.path)
        cases[f"plain-{job}"] = job, [], {}
        cases[f"armed-{job}{more}"] = job, [], more
        cases[one.path] = job, [one.path], more
    return run(tmp_path_factory.mktemp("taken"), cases)


@pytest.mark.parametrize("path", [one.path for one in OF_TORCH])
def test_without_it_the_job_trains_the_same_and_the_rest_is_recorded(path: str, outcomes: dict[str, Outcome]) -> None:
    one = next(one for one in NAMES if one.path == path)
    job, more = job_of(path), settings_of(path)
    plain, armed, found = outcomes[f"plain-{job}"], outcomes[f"armed-{job}{more}"], outcomes[path]
    assert "losses" in plain.out, plain.out
    assert armed.out == plain.out
    assert (armed.errors, armed.lost) == ([], set())
    assert found.out == plain.out
    because = private.because(one)
    if (because, one.lost) not in found.lost:
        assert path in NOT_MET, found.lost
    assert {why for why, _ in found.lost} <= {because}
    assert all(because[:100] in error or "hidden: " in error for error in found.errors)
    costs = COSTS.get(path, set()) | {row for part, rows in ROWS_OF.items() if part in one.lost for row in rows}
    missing = {
        row
        for row in armed.rows - found.rows
        if not row.startswith(("PAUSE:", "MEM:activations", "MEM:between_steps", "GAUGE:stack", *costs))
    }
    assert missing == set()


NOT_MET: Final = {
    "torch.distributed.distributed_c10d:_get_default_store",  # of several ranks without our launcher
    "torch._dynamo.utils:get_compilation_metrics",  # of a job that compiles again and again
    "torch.profiler:_ExperimentalConfig",  # of a job on a device
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",  # of a job that checkpoints activations
    "torch.library:Library._destroy",  # of a capture by the helper after one in Python
}
"""Names that the small jobs do not come by."""


def test_with_the_native_helper_and_none_of_them_the_job_trains_the_same(tmp_path: Path) -> None:
    build_helper()
    hidden = [one.path for one in OF_TORCH]
    found = run(tmp_path, {"plain-loop": ("loop", [], {}), "none": ("loop", hidden, {})}, native="1")
    assert found["none"].out == found["plain-loop"].out
    assert {"COMM:all_reduce", "WAIT:all_reduce", "PHASE:forward", "PHASE:optimizer"} <= found["none"].rows
    assert ("PHASE:backward" in found["none"].rows, "PHASE:data" in found["none"].rows) == (False, False)
    assert next(fact for fact in found["none"].facts if fact["fact"] == "group")["ranks"] == [0]


def test_what_is_lost_is_a_warning_of_the_run_and_refuses_what_rests_on_it(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["torch.autograd:_engine_run_backward"]
    info = merge(RunFolder(found.folder))
    why = f"{private.because(next(iter(NAMES)))}"
    assert f"rank 0: {why}: backward passes are not recorded" in info.warnings
    assert not [warning for warning in info.warnings if "error inside dsprof" in warning]
    facts = {"lost": [fact for fact in info.facts if fact["fact"] == "lost"]}
    assert reasons(facts, ["pause.gc"]) == {EVERYTHING: f"backward passes are not recorded ({why})"}


@pytest.mark.parametrize("one", [one for one in NAMES if one not in OF_TORCH], ids=lambda one: one.path)
def test_a_name_that_is_not_here_says_what_is_lost(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA and of frameworks: where this machine has them, they are hidden."""
    told: list[statements.Fact] = []
    monkeypatch.setattr(statements, "_sink", told.append)
    module, _, attributes = one.path.partition(":")
    monkeypatch.setitem(sys.modules, module, None if one.package != "torch" else sys.modules.get(module))
    if one.package == "torch":
        owner = sys.modules[module]
        monkeypatch.delattr(owner, attributes, raising=False)
    assert private.find(one.path) is None
    (fact,) = told
    assert (fact["what"], fact["collectors"]) == (one.lost, list(one.collectors))
    assert fact["because"].endswith(f"has no {one.name}")


# --- parts --------------------------------------------------------------------------------------


def test_a_part_that_fails_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[statements.Fact] = []
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(statements, "_sink", told.append)
    monkeypatch.setattr(hook_parts, "count_error", lambda where, error: counted.append((where, str(error))))

    def fails() -> None:
        raise RuntimeError("moved")

    gone: list[str] = []
    failed: list[Exception] = []
    made = install_each(
        "phases",
        [
            HookPart("the first is not recorded", lambda: lambda: gone.append("first")),
            HookPart("the second is not recorded", fails, decisive=True),
            HookPart("the third is not recorded", lambda: None),
            HookPart("backward", lambda: private.need("torch._C._autograd:_profiler_enabled") and None),
            HookPart("the last is not recorded", lambda: lambda: gone.append("last")),
        ],
        failed,
    )
    for uninstall in made:
        uninstall()
    assert gone == ["first", "last"]
    assert counted == [("installing phases", "moved")]
    assert [str(error) for error in failed] == ["moved"]
    assert told == [
        {
            "fact": "lost", "collectors": ["phases"], "what": "the second is not recorded",
            "because": "RuntimeError: moved", "decisive": True,
        }
    ]  # fmt: skip
