"""`with dsprof.profile(...)`: a part of a program that runs already."""

from __future__ import annotations

import html
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import forked_python
from jobs import environment

MODEL = """
import json, os, sys, time, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

def job(rank, world, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(64, 8), bucket_cap_mb=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(40, 64)), batch_size=4)
    return model, optimizer, loader

def train(model, optimizer, loader):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

import dsprof
"""


def run(tmp_path: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(MODEL + textwrap.dedent(code))
    done = forked_python.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(DSPROF_NATIVE="0", **env),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_twice_in_a_program_whose_model_is_there_already(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        model, optimizer, loader = job(0, 1, "store")
        train(model, optimizer, loader)                       # not profiled
        told = []
        for name in ("first", "second"):
            began = time.monotonic_ns()
            with dsprof.profile(name) as run:
                train(model, optimizer, loader)
                with dsprof.span("mine"):
                    pass
                try:
                    run.verdict
                except Exception as error:
                    during = str(error)
            train(model, optimizer, loader)                   # nor this
            facts = run.analysis.run.facts_by_kind()
            rows = run.events
            told.append({
                "during": during, "name": run.analysis.run.name, "steps": run.analysis.step_count,
                "status": run.analysis.run.status, "kinds": sorted(set(rows["kind"].astype(str))),
                "spans": int((rows["name"] == "mine").sum()),
                "buckets": [fact["bucket_cap_mb"] for fact in facts["ddp"]],
                "batch": [fact["batch_size"] for fact in facts["dataloader"]],
                "optimizers": [fact["class"] for fact in facts["optimizer"]],
                "parts": sorted(run.analysis.memory_uses[0].parts),
                "began_in_it": run.analysis.run.ranks[0].started_ns >= began, "path": str(run.path),
            })
        print(json.dumps(told))
        """,
    )  # fmt: skip
    assert done.stderr == ""
    first, second = json.loads(done.stdout)
    assert (first["name"], second["name"]) == ("first", "second")
    assert first["path"] != second["path"]
    for told in (first, second):
        assert told["during"] == "the block is still running"
        assert (told["steps"], told["status"], told["spans"]) == (10, 0, 1)
        assert {"step", "phase", "comm", "wait"} <= set(told["kinds"])
        assert told["began_in_it"]  # what came before is no start-up of it
        assert (told["buckets"], told["batch"], told["optimizers"]) == ([7.0], [4], ["SGD"])
        assert {"parameters", "gradients"} <= set(told["parts"])
    assert len(list((tmp_path / "dsprof-out").iterdir())) == 2


def test_the_ranks_of_a_job_make_one_run_of_each_block(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        child = os.fork()
        model, optimizer, loader = job(0 if child else 1, 2, "store")
        paths = []
        for name in ("a", "b"):
            with dsprof.profile(name) as run:
                train(model, optimizer, loader)
            paths.append(run.path.name)
        dist.barrier()
        if child:
            os.waitpid(child, 0)
            analysis = run.analysis
            print(json.dumps([paths, list(analysis.ranks_captured), analysis.step_count, len(run.collectives)]))
            sys.stdout.flush()
        else:
            os._exit(0)
        """,
    )
    paths, ranks, steps, collectives = json.loads(done.stdout.splitlines()[-1])
    assert sorted(path.name for path in (tmp_path / "dsprof-out").iterdir()) == sorted(paths)
    assert (ranks, steps) == ([0, 1], 10)
    assert collectives >= 10


def test_what_has_no_step_says_what_one_is(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        model = torch.nn.Linear(4, 4)
        with dsprof.profile("inference") as run:
            for _ in range(3):
                model(torch.ones(1, 4))
        print(repr(run))
        print("IN A CELL", run._repr_html_())
        """,
    )
    said, _, shown = done.stdout.partition("IN A CELL")
    for words in (said, html.unescape(shown)):
        assert "A step ends with an optimizer's step, or with a backward where no optimizer steps" in words


def test_a_block_that_raises_raises_and_can_be_looked_at(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with dsprof.profile("stopped") as run:
                for _ in range(6):
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.step()
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print(json.dumps([run.analysis.step_count, run.analysis.run.status, run.analysis.run.hints]))
        """,
    )
    assert json.loads(done.stdout) == [6, None, ["the block ended with KeyboardInterrupt"]]


def test_what_is_wrong_with_the_profiler_does_not_reach_the_block(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with dsprof.profile("nowhere", output="/proc/nowhere") as run:
                print("the block ran")
        print([str(one.message)[:36] for one in heard])
        try:
            run.verdict
        except Exception as error:
            print(type(error).__name__, str(error)[:24])
        """,
    )
    assert done.stdout.splitlines() == [
        "the block ran", "['dsprof: it could not be profiled (Fi']", "RunError it could not be profiled",
    ]  # fmt: skip


def test_in_a_program_that_is_profiled_as_a_whole_the_block_is_a_span(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with dsprof.profile("mine") as run:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        print(run.why)
        """,
        DSPROF="1", DSPROF_RUN=str(tmp_path / "whole"),
    )  # fmt: skip
    assert done.stdout == "this program is profiled as a whole: the block is a span of that run\n"
    assert not (tmp_path / "dsprof-out").exists()
    rows = dsprof_rows(tmp_path / "whole")
    assert rows.count("mine") >= 2  # the first one began before the capture did


def dsprof_rows(folder: Path) -> list[str]:
    import dsprof

    return [str(name) for name in dsprof.load(folder).events["name"]]
