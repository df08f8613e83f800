"""Every knob: its override reaches the object, its change can be written or is told by hand, and its what-if moves the
steps in the direction in which the knob does. A knob without a case fails."""

from __future__ import annotations

import ast
import gc
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from synthetic import Job, constant
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dsprof.analyzer.ask import ask as answer
from dsprof.analyzer.study import Study, study
from dsprof.engine.config import key_says
from dsprof.fix import changes
from dsprof.knobs import KNOBS, KnobError, find
from dsprof.knobs.json_config import MAY_CHANGE
from dsprof.knobs.predicted import CHANGES, turned
from dsprof.launch.launch import environment
from dsprof.run import RunFolder
from dsprof.settings import Settings
from dsprof.trace import Trace

Values = dict[str, Any]


# --- what a job makes, and what it then has


def ddp() -> Any:
    return DistributedDataParallel(nn.Linear(2, 2))


def sharded() -> Any:
    from torch.distributed import fsdp

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    return model


def unit(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def loader(**more: Any) -> Any:
    return DataLoader([1, 2], **more)  # type: ignore[arg-type]


def schedule() -> Any:
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    return pipelining.Schedule1F1B(stage, 3, loss_fn=nn.MSELoss())


def adam() -> Any:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))])


def hook_of_ddp() -> str:
    """The function that a model's gradients travel by."""
    names: list[str] = []
    original = DistributedDataParallel.register_comm_hook

    def register(model: Any, state: Any, hook: Any) -> None:
        names.append(hook.__name__)
        original(model, state, hook)

    DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]
    try:
        ddp()
    finally:
        DistributedDataParallel.register_comm_hook = original  # type: ignore[method-assign]
    return names[-1] if names else ""


def reduces_in_backward() -> list[bool]:
    model = ddp()
    told = []
    for _ in range(2):
        output = model(torch.ones(1, 2))
        told.append(bool(model.require_backward_grad_sync))
        output.sum().backward()
    return told


def compiled() -> dict[str, Any]:
    """What torch.compile is called with, of a decorated function."""
    torch.compile(lambda x: x)
    return CALLS_OF_COMPILE.pop()


CALLS_OF_COMPILE: list[dict[str, Any]] = []


def takes_as_torch_compile_does(
    model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, backend: Any = None, mode: Any = None,
    options: Any = None, disable: bool = False,
) -> Any:  # fmt: skip
    CALLS_OF_COMPILE.append({"dynamic": dynamic, "mode": mode, "disable": disable})
    return model


def steps_taken() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    for _ in range(4):
        optimizer.step()


def frozen() -> bool:
    before = gc.get_freeze_count()
    steps_taken()
    after = gc.get_freeze_count()
    gc.unfreeze()
    return after > before


def collects_by_itself() -> bool:
    steps_taken()
    return gc.isenabled()


def of_a_module(name: str, attribute: str, cls: str, given: str) -> Callable[[], Any]:
    """What a made-up class of a framework is constructed with: imported after the knobs are turned."""

    def make() -> Any:
        module = sys.modules[name]
        return getattr(getattr(module, cls)(), given)

    return make


Case = tuple[Any, Callable[[], Any], Any]
"""A value, what a job makes that has it, and what is to be there."""
REACHED: dict[str, Case] = {
    "ddp.bucket_cap_mb": (7, lambda: ddp().bucket_bytes_cap, 7 << 20),
    "ddp.static_graph": (True, lambda: ddp().static_graph, True),
    "ddp.find_unused_parameters": (True, lambda: ddp().find_unused_parameters, True),
    "ddp.gradient_as_bucket_view": (True, lambda: ddp().gradient_as_bucket_view, True),
    "ddp.broadcast_buffers": (False, lambda: ddp().broadcast_buffers, False),
    "ddp.comm_hook": ("bf16", hook_of_ddp, "bf16_compress_hook"),
    "ddp.accumulate": (2, reduces_in_backward, [False, True]),
    "fsdp2.reshard_after_forward": (False, lambda: unit(sharded()[0]).post_forward_mesh_info, None),
    "fsdp2.modules_per_unit": (2, lambda: len({id(unit(layer)) for layer in sharded()}), 2),
    "fsdp2.forward_prefetch": (2, lambda: len(sharded()[0]._get_fsdp_state()._states_to_forward_prefetch), 2),
    "fsdp2.backward_prefetch": (2, lambda: len(sharded()[3]._get_fsdp_state()._states_to_backward_prefetch), 2),
    "fsdp2.param_dtype": ("bfloat16", lambda: unit(sharded()[0]).mp_policy.param_dtype, torch.bfloat16),
    "fsdp2.reduce_dtype": ("bfloat16", lambda: unit(sharded()[0]).mp_policy.reduce_dtype, torch.bfloat16),
    "loader.num_workers": (3, lambda: loader().num_workers, 3),
    "loader.prefetch_factor": (5, lambda: loader(num_workers=1).prefetch_factor, 5),
    "loader.pin_memory": (True, lambda: loader().pin_memory, True),
    "loader.persistent_workers": (True, lambda: loader(num_workers=1).persistent_workers, True),
    "pipelining.microbatches": (6, lambda: schedule()._n_microbatches, 6),
    "pipelining.schedule": ("gpipe", lambda: type(schedule()).__name__, "ScheduleGPipe"),
    "optimizer.fused": (True, lambda: adam().defaults["fused"], True),
    "optimizer.foreach": (False, lambda: adam().defaults["foreach"], False),
    "compile.dynamic": (True, lambda: compiled()["dynamic"], True),
    "compile.mode": ("max-autotune", lambda: compiled()["mode"], "max-autotune"),
    "compile.disable": (True, lambda: compiled()["disable"], True),
    "gc.freeze": (True, frozen, True),
    "gc.every": (0, collects_by_itself, False),
    "affinity.cores": (2, lambda: sorted(CORES), [2, 3]),
    "trainer.*": (4, lambda: vars(sys.modules["transformers.training_args"])["TrainingArguments"]().size, 4),
    "accelerate.*": (4, lambda: vars(sys.modules["accelerate.accelerator"])["Accelerator"]().size, 4),
    "lightning.*": (4, lambda: vars(sys.modules["lightning.pytorch.trainer.trainer"])["Trainer"]().size, 4),
}
OF_LAUNCHER = {"env.*"}
"""Applied by the launcher, by the job's environment."""
CORES: set[int] = set()
FRAMEWORKS = {
    "transformers.training_args": (
        "from dataclasses import dataclass\n@dataclass\nclass TrainingArguments:\n"
        "    size: int = 1\n    def __post_init__(self): pass\n"
    ),
    "accelerate.accelerator": "class Accelerator:\n    def __init__(self, size=1): self.size = size\n",
    "lightning.pytorch.trainer.trainer": "class Trainer:\n    def __init__(self, size=1): self.size = size\n",
}
"""Module -> what stands in its place, so that no test imports the framework."""


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with four cores, a torch.compile that compiles nothing, and frameworks that are there already."""
    CORES.clear()
    CORES.update(range(4))

    def take(_: int, own: list[int]) -> None:
        CORES.intersection_update(own)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr("os.sched_setaffinity", take)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("DSPROF_PINNED", raising=False)
    monkeypatch.setattr(torch, "compile", takes_as_torch_compile_does)
    for name, source in FRAMEWORKS.items():
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, module.__dict__)


def test_every_knob_has_a_case() -> None:
    assert REACHED.keys() | OF_LAUNCHER == {knob.key for knob in KNOBS}


@pytest.mark.parametrize("key", REACHED)
def test_its_override_reaches_the_object(
    key: str, turn: Callable[[Values], None], group: None, surroundings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, look, expected = REACHED[key]
    was_enabled = gc.isenabled()
    key = key.replace("*", "size")
    assert find(key).read(json.dumps(value) if not isinstance(value, str) else value, key) == value
    turn({key: value})
    try:
        assert look() == expected
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("key", REACHED)
def test_without_it_the_object_is_another(key: str, group: None, surroundings: None) -> None:
    """Else the test above could not fail."""
    _, look, expected = REACHED[key]
    assert look() != expected


def test_the_launcher_applies_variables(tmp_path: Path) -> None:
    env = environment({}, RunFolder(tmp_path), Settings(), bootstrap=False, knobs={"env.OMP_NUM_THREADS": "4"})
    assert env["OMP_NUM_THREADS"] == "4"


# --- written

SCRIPT = "model = DistributedDataParallel(model)\nloader = DataLoader(data)\nfully_shard(model)\n"
WRITTEN = {
    key
    for key in REACHED
    if key.partition(".")[0] in ("ddp", "loader") and key not in ("ddp.comm_hook", "ddp.accumulate")
} | {"fsdp2.reshard_after_forward"}
"""Arguments of calls."""


@pytest.mark.parametrize("key", [*REACHED, "env.*"])
def test_its_change_is_written_or_told_by_hand(key: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    facts = {kind: [{"site": f"{tmp_path}/train.py:{line}", "framework": None}]
             for line, kind in enumerate(("ddp", "dataloader", "fsdp"), 1)}  # fmt: skip
    value, name = REACHED.get(key, ("4", None, None))[0], key.replace("*", "size")
    found = changes({name: value}, facts, tmp_path)
    if key not in WRITTEN:
        (line,) = found.left
        assert name.removeprefix("env.") in line
        assert not found.texts
        return
    assert found.left == []
    (text,) = found.texts.values()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    given = {keyword.arg: ast.literal_eval(keyword.value) for call in calls for keyword in call.keywords}
    assert given == {key.partition(".")[2]: value}


def a_value(key: str) -> Any:
    """One that a key of a JSON configuration takes."""
    words = ("cpu", "bf16", "gpipe", "every_k", "uniform", "ring", "zigzag")
    for value in (True, 3, 1024, *words, 0.5, [1.0, 2.0], {"device": "cpu"}):
        with suppress(KnobError):
            return find(key).read(json.dumps(value) if not isinstance(value, str) else value)
    raise AssertionError(f"no value for {key}")


@pytest.mark.parametrize("key", [*MAY_CHANGE, "optimizer.type"])
def test_a_key_of_a_configuration_is_written_into_it(key: str, tmp_path: Path) -> None:
    assert key_says(key)
    path, content, value = tmp_path / "ds.json", {"zero_optimization": {"stage": 2}}, a_value(key)
    path.write_text(json.dumps(content))
    facts = {"config": [{"path": str(path), "content": content}]}
    (text,) = changes({key: value}, facts, tmp_path).texts.values()
    place = json.loads(text)
    for part in key.split("."):
        place = place[part]
    assert place == value


# --- predicted

SMALL = (2048, 4096, 512, 8192) * 20
DDP = {"fact": "ddp", "rank": 0, "site": "train.py:9", "gradient_bytes": list(SMALL)}


def of_small_buckets() -> Study:
    return study(Job(buckets=SMALL, latency_ms=4.0, facts=[DDP]).trace())


def of_small_units() -> Study:
    """A step gathers 40 parameters and scatters 40 gradients, one at a time."""
    fsdp = {"fact": "fsdp", "rank": 0, "version": 2, "units": 40, "site": "train.py:9"}
    trace = Job(steps=30, buckets=(4096,) * 80, latency_ms=3.6, facts=[fsdp]).trace()
    rows = trace.rows.astype({"name": object, "purpose": object})
    comm = rows["kind"] == "comm"
    rows.loc[comm, ["name", "purpose"]] = ["reduce_scatter", "gradient"]
    rows.loc[comm & (rows["seq"] % 80 < 40), ["name", "purpose"]] = ["all_gather", "parameter"]
    return study(Trace.of(trace.run, rows))


def of_a_collector() -> Study:
    return study(Job(gc=lambda rank, step: 30 if rank == 0 else 0).trace())


def of_a_slow_loader() -> Study:
    fact = {"fact": "dataloader", "rank": 0, "num_workers": 0, "site": "train.py:12"}
    return study(Job(data=constant(300), facts=[fact]).trace())


def of_recompiling() -> Study:
    return study(Job(ranks=3, compiling=lambda rank, step: 50 + step % 7 if rank == 1 else 0).trace())


MOVES: dict[str, tuple[Callable[[], Study], tuple[Any, ...]]] = {
    "ddp.bucket_cap_mb": (of_small_buckets, (0.001, 0.005, 0.1)),
    "fsdp2.modules_per_unit": (of_small_units, (1, 2, 4)),
    "gc.freeze": (of_a_collector, (True,)),
    "gc.every": (of_a_collector, (0,)),
    "loader.num_workers": (of_a_slow_loader, (4,)),
    "compile.dynamic": (of_recompiling, (True,)),
}
"""Key -> a made-up run that suffers from its value, and others, each of which saves as much as those before it."""
ELSEWHERE = {
    "zero_optimization.reduce_bucket_size": ("test_rules_zero.py", "most_bytes=240, blocking=True"),
    "ddp.accumulate": ("test_rules_redundant.py", "ddp.accumulate"),
    "ddp.comm_hook": ("test_rules_volume.py", 'turned("ddp.comm_hook", "bf16", "RUN")'),
    "ddp.broadcast_buffers": ("test_rules_redundant.py", "ddp.broadcast_buffers"),
    "communication_data_type": ("test_rules_volume.py", 'turned("communication_data_type", "bf16", "RUN")'),
    "bf16.check_grad_overflow": ("test_overflow_check.py", 'KEY, SITE = "bf16.check_grad_overflow"'),
    "bf16.enabled": ("test_number_formats.py", "bf16__enabled=True)"),
    "fsdp2.param_dtype": ("test_number_formats.py", 'fsdp2__param_dtype="bfloat16")'),
    "fsdp2.reduce_dtype": ("test_number_formats.py", 'saved(run(), fsdp2__reduce_dtype="bfloat16")'),
    "loader.prefetch_factor": ("test_rules_data.py", "prefetch_factor=8, num_workers=9"),
    "loader.persistent_workers": ("test_rules_data.py", 'turned("loader.persistent_workers", True, "RUN")'),
    "optimizer.type": ("test_zero_knobs.py", '"optimizer.type", "OneBitAdam")'),
    "optimizer.params.freeze_step": ("test_zero_knobs.py", "FREEZE, 10)"),
    "zero_optimization.stage3_prefetch_bucket_size": ("test_zero_knobs.py", "**ALONE)), PREFETCH"),
    "zero_optimization.stage3_max_live_parameters": ("test_zero_knobs.py", "saved(job(facts), LIVE"),
    "zero_optimization.stage": ("test_zero_knobs.py", "saved(made, STAGE, 1)"),
    "zero_optimization.overlap_comm": ("test_zero_knobs.py", "OVERLAP, True)"),
    "zero_optimization.zero_quantized_weights": ("test_zero_knobs.py", "WEIGHTS, True)"),
    "zero_optimization.zero_quantized_gradients": ("test_zero_knobs.py", "GRADIENTS, True)"),
    "zero_optimization.offload_optimizer": ("test_rules_offload.py", "zero_optimization.offload_optimizer"),
    "zero_optimization.offload_optimizer.device": ("test_rules_offload.py", "offload_optimizer.device"),
    "zero_optimization.offload_param": ("test_rules_offload.py", "zero_optimization.offload_param"),
    "zero_optimization.offload_param.device": ("test_rules_offload.py", "zero_optimization.offload_param.device"),
    "fsdp2.reshard_after_forward": ("test_zero_knobs.py", '"fsdp2.reshard_after_forward", False'),
    "fsdp2.forward_prefetch": ("test_zero_knobs.py", "fsdp2.forward_prefetch"),
    "fsdp2.backward_prefetch": ("test_zero_knobs.py", "fsdp2.backward_prefetch"),
    "heterogeneous.speeds": ("test_unequal_shares.py", "heterogeneous.speeds"),
    "context_parallel.order": ("test_rules_sequence.py", "context_parallel.order"),
    "fp8": ("test_rules_float8.py", 'answered(trace, "fp8", '),
    "fp8.enabled": ("test_rules_float8.py", 'answered(trace, "fp8.enabled", True)'),
}
"""Key -> the file where its what-if is tested on a run that is not made up as easily, and by which words."""


def test_every_what_if_has_a_case() -> None:
    assert MOVES.keys() | ELSEWHERE.keys() == CHANGES.keys()
    for file, words in ELSEWHERE.values():
        assert words in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("key", MOVES)
def test_its_what_if_moves_the_steps_as_the_knob_does(key: str) -> None:
    make, values = MOVES[key]
    rows = answer(make(), [[turned(key, value, "RUN")] for value in values]).rows
    saved = [row.gain.ms for row in rows if row.gain is not None]
    assert len(saved) == len(values), [row.reason for row in rows]
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(saved))
    assert saved[-1] > 5
    assert len(saved) == 1 or saved[0] < 0.6 * saved[-1]
