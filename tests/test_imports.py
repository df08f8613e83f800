"""Who may import whom (the rules of CONTRIBUTING.md), and what arming does to a training process."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import forked_python
import pytest
from jobs import ABORTED

ROOT = Path(__file__).parents[1]

# --- the rules ----------------------------------------------------------------------------------

LAYERS: Final = {
    "schema": (
        "dsprof.atomic",
        "dsprof.control",
        "dsprof.data_sheets",
        "dsprof.exported",
        "dsprof.gauges",
        "dsprof.live",
        "dsprof.names",
        "dsprof.ondisk",
        "dsprof.permissions",
        "dsprof.ranges",
        "dsprof.redact",
        "dsprof.regular_files",
        "dsprof.run",
        "dsprof.schema",
        "dsprof.secret_names",
        "dsprof.words",
    ),
    "trace": ("dsprof.trace",),
    "importers": ("dsprof.importers",),
    "analyzer": ("dsprof.analyzer",),
    "compare": ("dsprof.compare",),
    "knobs": ("dsprof.knobs",),
    "fix": ("dsprof.fix",),
    "plan": ("dsprof.plan",),
    "reports": ("dsprof.reports",),
    "interactive": ("dsprof.interactive",),
    "cli": (
        "dsprof.__main__", "dsprof.cli", "dsprof.doctor", "dsprof.launch", "dsprof.machine", "dsprof.settings",
        "dsprof.slow_settings",
    ),
    "collectors": ("dsprof.collectors",),
    "engine": ("dsprof.engine",),
    "public": ("dsprof",),
}  # fmt: skip
"""Layer -> its modules and packages. Every module belongs to one; `dsprof` itself is only its __init__."""

LIVE: Final = {f"dsprof.live.{name}" for name in ("activity", "frames", "tail", "waiting")}

MAY_IMPORT: Final = {
    "schema": {"schema"},
    "trace": {"trace", "schema"},
    "importers": {"importers", "trace", "schema"},
    "analyzer": {"analyzer", "trace", "schema"},
    "compare": {"compare", "analyzer", "schema"},
    "knobs": {"knobs", "analyzer", "trace", "schema"},
    "fix": {"fix", "knobs", "analyzer", "trace", "schema"},
    "plan": {"plan", "knobs", "analyzer", "trace", "schema"},
    "reports": {"reports", "compare", "fix", "plan", "knobs", "analyzer", "trace", "schema"},
    "interactive": {"interactive", "compare", "reports", "fix", "plan", "knobs", "analyzer", "trace", "schema"},
    "cli": {"cli", "compare", "reports", "importers", "fix", "plan", "knobs", "trace", "schema", "public"},
    "collectors": {
        "collectors",
        "dsprof.atomic",
        "dsprof.control",
        "dsprof.gauges",
        "dsprof.names",
        "dsprof.ondisk",
        "dsprof.permissions",
        "dsprof.ranges",
        "dsprof.redact",
        "dsprof.regular_files",
        "dsprof.schema",
        "dsprof.words",
        "dsprof.engine.hooks",
        *LIVE,
    },
    "engine": {"engine", "dsprof.data_sheets", "dsprof.words"},
    "public": {"dsprof.collectors.spans", "interactive"},
}
"""Layer -> what of ours it may import: whole layers, or single modules by name."""

EXCEPTIONS: Final = {
    "dsprof.analyzer.rules.missing_collectors": {"dsprof.collectors.catalogue"},
    "dsprof.knobs": {"dsprof.collectors.overrides.pipelining", "dsprof.engine.config"},
    "dsprof.analyzer": {
        "dsprof.engine.schedule",
        "dsprof.engine.partition",
        "dsprof.engine.config",
        "dsprof.engine.precision.gain",
    },
    "dsprof.launch": {
        "dsprof.collectors.capture.copier",
        "dsprof.collectors.arming.free_threaded",
        "dsprof.collectors.memory.process_memory",
        "dsprof.collectors.native.build",
        "dsprof.collectors.capture.scratch",
        "dsprof.collectors.overrides.install",
    },
    "dsprof.interactive.profiled": {"dsprof.collectors.arming.in_process", "dsprof.collectors.spans"},
    "dsprof.cli.fix": {"dsprof.analyzer.text"},
    "dsprof.cli.report": {"dsprof.analyzer.analysis"},
    "dsprof.cli.tune": {"dsprof.analyzer.text"},
    "dsprof.cli.live": {"dsprof.collectors.capture.scratch"},
    "dsprof.cli.build": {"dsprof.collectors.native.build", "dsprof.collectors.native.places"},
    "dsprof.doctor": {"dsprof.engine.config"},
    "dsprof.slow_settings": {"dsprof.engine.config"},
    "dsprof.fix.batch_sizes": {"dsprof.engine.config"},
    "dsprof.cli.doctor": {"dsprof.engine.config"},
    "dsprof.settings": {"dsprof.collectors.catalogue"},
    "dsprof.machine": {
        "dsprof.collectors.catalogue",
        "dsprof.collectors.native.build",
        "dsprof.collectors.hooking.private",
    },
    "dsprof.collectors.bootstrap.sitecustomize": {"dsprof"},
}
"""Module or package -> what else it may import: what the engine shares with the analyzer and with `dsprof doctor`, the
helper's build and where it is kept, the table of the collectors, the private names that they use, and the bootstrap,
which looks whether dsprof is installed at all."""

THIRD_PARTY: Final = {
    "schema": set(),
    "trace": {"numpy", "orjson", "pandas", "pyarrow"},
    "importers": {"numpy", "pandas", "pyarrow"},
    "analyzer": {"numpy", "pandas", "scipy"},
    "compare": {"numpy", "pandas", "scipy"},
    "knobs": set(),
    "fix": {"numpy", "scipy"},
    "plan": {"numpy", "scipy"},
    "reports": {"jinja2", "markupsafe", "numpy", "orjson", "pandas", "plotly", "rich", "tensorboard", "werkzeug"},
    "cli": {"pynvml", "rich", "tensorboard", "torch", "typer"},
    "collectors": {"torch"},
    "engine": {"torch"},
    "interactive": {"numpy", "pandas"},
    "public": set(),
}
"""Layer -> packages beyond the standard library."""

THIRD_PARTY_EXCEPTIONS: Final = {
    "dsprof.engine.config": {"pydantic"},
    "dsprof.engine.precision.triton_casts": {"triton"},
    "dsprof.reports.export.parquet": {"pyarrow"},
    "dsprof.trace.dask_cluster": {"distributed"},
    "dsprof.reports.export.perfetto": {"perfetto"},
}
"""Module or package -> packages that it alone of its layer may import."""

TORCH_FREE: Final = (
    "dsprof.engine.hooks", "dsprof.engine.schedule", "dsprof.engine.partition", "dsprof.engine.config",
    "dsprof.engine.precision.gain",
)  # fmt: skip
"""Of the engine, what others share: the standard library, and what THIRD_PARTY_EXCEPTIONS says."""

ONLY_INSIDE_FUNCTIONS: Final = {
    "cli": {"dsprof.engine", "dsprof.importers", "dsprof.reports", "pynvml", "rich", "tensorboard", "torch"},
    "collectors": {"torch"},
    "public": {"dsprof.collectors.spans", "dsprof.interactive"},
}
"""Layer -> what must not be imported with the module itself: `--help` is quick, and torch is the job's to import."""

NO_FILES_NO_PRINTING: Final = {"io", "logging", "os", "pathlib", "shutil", "subprocess", "sys", "tempfile"}
"""Modules that the analyzer, tables in and findings out, has no use for."""

ROOMS: Final = (
    "dsprof.engine", "dsprof.collectors", "dsprof.reports", "dsprof.analyzer", "dsprof.importers", "dsprof.cli",
    "dsprof.launch", "dsprof.interactive", "dsprof.compare", "dsprof.knobs", "dsprof.fix", "dsprof.trace",
    "dsprof.live", "dsprof.plan", "dsprof",
)  # fmt: skip
"""Inside one, imports are relative; between two, by full name. The last is what lies in dsprof/ itself."""

ENGINE_FLOORS: Final = (
    {"config", "data", "forward", "hooks", "partition", "schedule", "tree", "unsupported"},
    {"comm", "monitors"},
    {"optim"},
    {"activation_checkpoint", "tensor", "zero"},
    {"offload", "pipe", "sequence"},
    {"precision"},
    {"training_state"},
    {"checkpoint", "planner"},
    {"train"},
    {"setup"},
    {"deepspeed"},
)
"""The engine's rooms, the lowest floor first: imports go down, or stay inside a room, but for `PUBLIC_FACES`."""

COLLECTORS_FLOORS: Final = (
    {"catalogue", "hooking"},
    {"system", "overrides"},
    {"recorder"},
    {"native"},
    {"capture"},
    {"host", "loop"},
    {"communication", "memory"},
    {"devices", "failures", "frameworks"},
    {"arming"},
    {"bootstrap", "spans"},
    {"arm"},
)
"""The collectors' rooms, likewise. The capture finds the collectors by the catalogue, which names their modules."""

PUBLIC_FACES: Final = ("dsprof.engine", "dsprof.engine.tensor")
"""Packages whose `__init__` has public names of rooms above, which are loaded when they are used."""

TWICE: Final = {"Init"}
"""Classes of the engine that DeepSpeed's stand-in has under the same name, which is DeepSpeed's."""

DISTRIBUTIONS: Final = {"pynvml": "nvidia-ml-py", "werkzeug": "tensorboard", "triton": "torch"}
"""Import name -> name in pyproject.toml, where they differ; or what brings it."""

OPTIONAL: Final = ("perfetto", "dask")
"""Extras of pyproject.toml whose packages dsprof uses where they are installed."""

HEAVY: Final = (
    "pandas", "pyarrow", "plotly", "pydantic", "typer", "rich", "tensorboard", "jinja2", "scipy", "orjson",
)  # fmt: skip
"""What has no place in a training process."""

BESIDE: Final = ("psutil", "pynvml")
"""What a training process loads, but not on its training thread (`collectors/capture/side_thread.py`)."""


# --- reading the source -------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    module: str
    """Who imports."""
    target: str
    """What, by full name."""
    line: int
    relative: bool
    lazy: bool
    """Inside a function, or for the type checker only."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def source_files() -> dict[str, Path]:
    """Full name -> file, of every module of the four folders."""
    found = {}
    for folder, _, files in os.walk(ROOT / "dsprof", followlinks=True):
        for name in files:
            if name.endswith(".py"):
                path = Path(folder) / name
                words = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


FILES = source_files()


def gives(package: str, name: str) -> bool:
    """Whether what one gets of a package by the name of one of its modules is what that module defines by this name."""
    return re.search(rf"^from \.{name} import .*\b{name}\b", FILES[package].read_text(), re.M) is not None


def imports(module: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, False, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *(child.module or "").split(".")]).rstrip(".")
                for alias in child.names:
                    whole = f"{source}.{alias.name}"
                    target = whole if whole in FILES and not gives(source, alias.name) else source
                    yield Import(module, target, child.lineno, child.level > 0, lazy)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, True)
            elif not isinstance(child, ast.expr):  # in which no import can stand
                yield from visit(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    return visit(tree, False)


@functools.cache
def all_imports() -> list[Import]:
    """Found by the first test that asks, and not in every process that only collects this file."""
    return [found for module, path in sorted(FILES.items()) for found in imports(module, path)]


def ours() -> list[Import]:
    return [found for found in all_imports() if found.target.partition(".")[0] == "dsprof"]


def others() -> list[Import]:
    elsewhere = {"dsprof", "__future__", *sys.stdlib_module_names}
    return [found for found in all_imports() if found.target.partition(".")[0] not in elsewhere]


def within(module: str, package: str) -> bool:
    return module == package or (module.startswith(f"{package}.") and package != "dsprof")


def layer_of(module: str) -> str:
    found = [layer for layer, packages in LAYERS.items() if any(within(module, package) for package in packages)]
    assert len(found) == 1, f"{module}: belongs to {found or 'no layer'}; say where in LAYERS"
    return found[0]


def room_of(module: str) -> str:
    return next((room for room in ROOMS[:-1] if within(module, room)), "dsprof")


def listed(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def circle_in(graph: Mapping[str, Collection[str]]) -> list[str]:
    """A circle, from one of its nodes back to it; empty if there is none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for target in sorted(graph.get(path[-1], ())):
            if target in path:
                return [*path[path.index(target) :], target]
            if target not in done and (found := walk([*path, target])):
                return found
        done.add(path[-1])
        return []

    return next((found for node in sorted(graph) if node not in done and (found := walk([node]))), [])


# --- holding them against each other ------------------------------------------------------------


def test_every_module_belongs_to_a_layer() -> None:
    assert {
        "schema",
        "trace",
        "importers",
        "analyzer",
        "reports",
        "interactive",
        "cli",
        "collectors",
        "compare",
        "engine",
        "fix",
        "plan",
        "knobs",
        "public",
    } == {layer_of(module) for module in FILES}
    assert len(all_imports()) > 200


def test_layers_import_downwards_only() -> None:
    def allowed(found: Import) -> bool:
        layer = layer_of(found.module)
        single = {name for module, names in EXCEPTIONS.items() if within(found.module, module) for name in names}
        return layer_of(found.target) in MAY_IMPORT[layer] or found.target in MAY_IMPORT[layer] | single

    wrong = [found for found in ours() if not allowed(found)]
    assert not wrong, listed(wrong)


def test_third_party_packages_stay_in_their_layers() -> None:
    def allowed(found: Import) -> bool:
        own = [names for module, names in THIRD_PARTY_EXCEPTIONS.items() if within(found.module, module)]
        shared = any(within(found.module, module) for module in TORCH_FREE)
        layer = set() if shared else THIRD_PARTY[layer_of(found.module)]
        return found.target.partition(".")[0] in layer.union(*own)

    wrong = [found for found in others() if not allowed(found)]
    assert not wrong, listed(wrong)


def test_what_the_engine_shares_needs_nothing_else_of_the_engine() -> None:
    """What is within one of them; torch would come with the rest."""
    for shared in TORCH_FREE:
        own = [found for found in ours() if within(found.module, shared) and within(found.target, "dsprof.engine")]
        wrong = [found for found in own if not within(found.target, shared)]
        assert not wrong, listed(wrong)


def test_what_is_heavy_is_imported_when_it_is_needed() -> None:
    def early(found: Import) -> bool:
        names = ONLY_INSIDE_FUNCTIONS.get(layer_of(found.module), set())
        return not found.lazy and any(within(found.target, name) for name in names)

    wrong = [found for found in all_imports() if early(found)]
    assert not wrong, listed(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Neither inside functions nor for the type checker: it could be imported, but not understood."""
    graph: dict[str, set[str]] = defaultdict(set)
    for found in ours():
        graph[found.module].add(found.target)
    assert len(graph) > 200
    assert not circle_in(graph), " imports ".join(circle_in(graph))


@pytest.mark.parametrize(
    ("arrows", "circle"),
    [("ab bc ac cd", ""), ("ab bc cb", "bcb"), ("ab ac cd da", "acda"), ("aa", "aa"), ("xa ab yb bx", "abxa")],
)
def test_circles_are_found(arrows: str, circle: str) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for one, other in arrows.split():
        graph[one].add(other)
    assert circle_in(graph) == list(circle)


@pytest.mark.parametrize(
    ("house", "floors", "least"),
    [("dsprof.engine", ENGINE_FLOORS, 400), ("dsprof.collectors", COLLECTORS_FLOORS, 250)],
)
def test_imports_go_down_the_floors(house: str, floors: Sequence[Collection[str]], least: int) -> None:
    def room(module: str) -> str:
        return module.split(".")[2]

    def floor(module: str) -> int:
        found = [number for number, rooms in enumerate(floors) if room(module) in rooms]
        assert len(found) == 1, f"{module}: on {len(found)} floors; say where in the table of {house}"
        return found[0]

    inside = [
        found for found in ours()
        if found.module not in PUBLIC_FACES
        and all(within(name, house) and name != house for name in (found.module, found.target))
    ]  # fmt: skip
    assert len(inside) > least
    wrong = [
        found for found in inside
        if room(found.module) != room(found.target) and floor(found.module) <= floor(found.target)
    ]  # fmt: skip
    assert not wrong, listed(wrong)


@pytest.mark.parametrize(("package", "fewest"), [("dsprof.engine", 13), ("dsprof.analyzer", 17)])
def test_a_folder_says_what_is_in_it(package: str, fewest: int) -> None:
    """Every file of a folder stands in the table of contents that its `__init__` begins with."""
    tables = {
        path.parent: ast.get_docstring(ast.parse(path.read_text())) or ""
        for module, path in FILES.items()
        if path.name == "__init__.py" and within(module, package) and module != "dsprof.engine"
    }
    assert len(tables) >= fewest
    missing = [
        str(path.relative_to(ROOT)) for path in FILES.values()
        if path.parent in tables and path.name != "__init__.py"
        and not re.search(rf"\b{path.stem}\b", tables[path.parent])
    ]  # fmt: skip
    assert not missing


def test_the_table_of_headers_names_each() -> None:
    """That of the native helper, with which `hooks.cpp` begins."""
    native = ROOT / "collectors" / "native"
    table = (native / "hooks.cpp").read_text().partition("#include")[0]
    headers = {path.name for path in native.glob("*.hpp") if not path.name.startswith("python_")}
    assert headers == set(re.findall(r"\w+\.hpp", table)) - {"layout.hpp"}


def test_the_tables_of_the_collectors_rooms_are_whole() -> None:
    """A line each file and folder, in the first column, and nothing else."""
    for face in sorted(path for module, path in FILES.items() if within(module, "dsprof.collectors")):
        if face.name != "__init__.py" or face.parent.name == "native":
            continue
        table = ast.get_docstring(ast.parse(face.read_text())) or ""
        listed = {name.rstrip("/") for name in re.findall(r"^([a-z_0-9]+/?) {2,}\S", table, re.MULTILINE)}
        there = {path.stem for path in face.parent.glob("*.py") if path.name != "__init__.py"}
        there |= {path.parent.name for path in face.parent.glob("*/*.py")}
        assert listed == there, face.parent.name


@pytest.mark.parametrize("engine", [True, False])
def test_no_two_classes_have_one_name(engine: bool) -> None:
    """Nor does one inside a function or class: a name that is read anywhere means one thing. The engine and what
    watches it never meet in one file."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in FILES.items():
        if within(module, "dsprof.engine") is engine:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{module}:{node.lineno}")
    assert len(places) > 80
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in TWICE}


def test_the_analyzers_rooms_can_be_read() -> None:
    """A file is a few pages, the way from a trace to an answer is one, and a file's name means one thing."""
    files = [path for path in (ROOT / "dsprof" / "analyzer").rglob("*.py") if path.name != "__init__.py"]
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert len(files) > 150
    assert [path.name for path, count in lines.items() if count > 400] == []
    assert lines[ROOT / "dsprof" / "analyzer" / "analyze.py"] <= 50
    names = [path.name for path in files]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_analyzer_touches_no_files_and_prints_nothing() -> None:
    wrong = [
        found
        for found in all_imports()
        if layer_of(found.module) == "analyzer" and found.target.partition(".")[0] in NO_FILES_NO_PRINTING
    ]
    assert not wrong, listed(wrong)
    for module, path in FILES.items():
        if layer_of(module) == "analyzer":
            called = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not called & {"print", "open", "input"}, module


def test_imports_are_relative_inside_a_room_and_full_between() -> None:
    def well_spelt(found: Import) -> bool:
        if found.module.endswith(("__main__", "sitecustomize")) or found.target == "dsprof":
            return not found.relative
        return found.relative == (room_of(found.module) == room_of(found.target))

    wrong = [found for found in ours() if not well_spelt(found)]
    assert not wrong, listed(wrong)


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    """`import engine` would work in the checkout and nowhere else, and find the user's own file there."""
    bare = {"analyzer", "cli", "collectors", "engine", "reports"}
    wrong = [found for found in all_imports() if not found.relative and found.target.partition(".")[0] in bare]
    assert not wrong, listed(wrong)


def test_what_is_imported_is_a_declared_dependency() -> None:
    """One of an extra is imported where it is used, for those who have it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">=")[0] for requirement in project["dependencies"]}
    extra = {
        requirement.partition(">=")[0] for name in OPTIONAL for requirement in project["optional-dependencies"][name]
    }
    for found in others():
        package = found.target.partition(".")[0]
        assert DISTRIBUTIONS.get(package, package) in (names | extra if found.lazy else names), listed([found])


# --- in a process of its own --------------------------------------------------------------------

TRAIN = """
import torch, torch.distributed as dist
torch.manual_seed(0)
store = dist.FileStore({store!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
print("trained to", sum(float(p.detach().sum()) for p in model.parameters()))
"""
MODULES = """
import json, sys
print(json.dumps(sorted(sys.modules)))
"""


def clean_environment(**extra: str) -> dict[str, str]:
    """A capture is in its run folder when the job has ended, however busy the machine is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "TORCH"))}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DSPROF_EXIT_WAIT": "60", **extra}


def python(program: str, folder: Path, *, fresh: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    for _ in range(3):
        done = forked_python.run(
            [sys.executable, "-c", program],
            capture_output=True, timeout=120, cwd=folder, env=clean_environment(**env), fresh=fresh,
        )  # fmt: skip
        if ABORTED not in done.stderr:
            break
    return done


def loaded(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True)
class Unarmed:
    """What the job does when nobody profiles it."""

    said: str
    modules: set[str]


@pytest.fixture(scope="module")
def unarmed(tmp_path_factory: pytest.TempPathFactory) -> Unarmed:
    folder = tmp_path_factory.mktemp("unarmed")
    done = python(TRAIN.format(store=str(folder / "store")) + MODULES, folder)
    assert done.stderr == ""
    return Unarmed(done.stdout.splitlines(keepends=True)[0], loaded(done))


def test_a_rank_that_is_not_armed_loads_the_entry_point_only(unarmed: Unarmed) -> None:
    ours = {name for name in unarmed.modules if name.startswith("dsprof.")}
    assert ours == {"dsprof.collectors", "dsprof.collectors.arm"}


@pytest.mark.parametrize("native", ["0", "1"])
def test_an_armed_rank_imports_no_analysis_package(tmp_path: Path, unarmed: Unarmed, native: str) -> None:
    run = tmp_path / "run"
    job = TRAIN.format(store=str(tmp_path / "store")) + MODULES
    armed = loaded(python(job, tmp_path, DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE=native))
    (capture,) = (run / "capture").iterdir()
    assert json.loads((capture / "meta.json").read_text())["closed"] is True

    added = armed - unarmed.modules
    assert "dsprof.collectors.capture.session" in added
    assert not {name.partition(".")[0] for name in added} & set(HEAVY)
    outside = {"dsprof", "torch", *sys.stdlib_module_names}
    beyond = {top for name in added if (top := name.partition(".")[0]) not in outside}
    assert beyond <= {"dsprof_native", *BESIDE}
    ours = {name for name in armed if name.partition(".")[0] == "dsprof"}
    assert {layer_of(name) for name in ours} <= {"public", "schema", "collectors", "engine"}


@pytest.mark.parametrize(
    "env",
    [
        {"DSPROF_RUN": "/proc/nowhere/run"},
        {"DSPROF_RANKS": "rubbish,,-"},
        {"DSPROF_DIR": "/proc/nowhere"},
        {"DSPROF_LEVEL": "no-such-level", "DSPROF_RANKS": "7"},
    ],
    ids=lambda env: " ".join(env),
)
def test_nothing_that_is_wrong_with_the_profiler_reaches_the_job(
    tmp_path: Path, unarmed: Unarmed, env: dict[str, str]
) -> None:
    given = {"DSPROF_RUN": str(tmp_path / "run"), **env} if "DSPROF_DIR" not in env else env
    armed = python(TRAIN.format(store=str(tmp_path / "store")), tmp_path, fresh=False, DSPROF="1", **given)
    assert (armed.returncode, armed.stdout, armed.stderr) == (0, unarmed.said, "")


@pytest.mark.parametrize("statement", ["import dsprof", "import dsprof.ondisk, dsprof.run", "import dsprof.engine"])
def test_light_imports(tmp_path: Path, statement: str) -> None:
    added = loaded(python(f"{statement}\n{MODULES}", tmp_path)) - loaded(python(MODULES, tmp_path))
    assert not {name.partition(".")[0] for name in added} & {*HEAVY, "torch", "numpy"}


def test_the_configuration_loads_without_torch_and_the_rest_of_the_engine(tmp_path: Path) -> None:
    added = loaded(
        python(f"from dsprof.engine.config import load\nload({{'train_batch_size': 1}})\n{MODULES}", tmp_path)
    )
    assert "pydantic" in added
    assert not {name.partition(".")[0] for name in added} & ({*HEAVY, "torch", "numpy"} - {"pydantic"})
    engine = {name for name in added if within(name, "dsprof.engine")}
    assert {name for name in engine if not within(name, "dsprof.engine.config")} == {
        "dsprof.engine",
    }


def test_the_command_line_starts_without_the_heavy_ones(tmp_path: Path) -> None:
    added = loaded(python(f"import dsprof.cli\ndsprof.cli.build_app()\n{MODULES}", tmp_path))
    heavy = {*HEAVY, "torch", "numpy"} - {"typer", "rich"}  # Typer brings rich along
    assert not {name.partition(".")[0] for name in added} & heavy


def test_script_folders_with_modules_of_the_same_names(tmp_path: Path, unarmed: Unarmed) -> None:
    """The user's engine.py, reports/, collectors/ and dsprof's own are both there."""
    job = tmp_path / "job"
    for package in ("reports", "collectors"):
        (job / package).mkdir(parents=True)
        (job / package / "__init__.py").write_text("mine = True\n")
    (job / "engine.py").write_text("mine = True\n")
    (job / "schema.py").write_text("mine = True\n")
    (job / "train.py").write_text(
        "import collectors, engine, reports, schema\n"
        "assert collectors.mine and engine.mine and reports.mine and schema.mine\n"
        + TRAIN.format(store=str(tmp_path / "store"))
        + "import dsprof.engine, dsprof.reports, dsprof.collectors.capture.session, sys\n"
        "assert not hasattr(dsprof.engine, 'mine') and not hasattr(dsprof.reports, 'mine')\n"
        "assert sys.modules['engine'] is engine\n"
    )
    run = tmp_path / "run"
    done = forked_python.run(
        [sys.executable, str(job / "train.py")],
        capture_output=True, timeout=120, cwd=job,
        env=clean_environment(DSPROF="1", DSPROF_RUN=str(run)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, unarmed.said), done.stderr
    assert len(list((run / "capture").glob("rank00000.*"))) == 1
