"""A process that forks while one of its threads holds a lock of the native helper: the child has no such thread."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forked_python
from captures import build_helper, compile_program, read_rows
from jobs import environment

from dsprof.collectors.native import build
from dsprof.ondisk import State
from dsprof.schema import Kind

NATIVE = Path(build.__file__).parent

HELD = r"""
#include <sys/wait.h>
#include <unistd.h>
#include <condition_variable>
#include <mutex>
#include <thread>
#include "forks.hpp"

struct Counted { std::mutex mutex; int count = 0; };
Counted& counted() { static dsprof::PerProcess<Counted> instance; return instance.get(); }
bool silent = false;
void fall_silent() { silent = true; }

int add() { std::lock_guard<std::mutex> lock(counted().mutex); return ++counted().count; }

int child() {
  alarm(60);
  return silent && add() == 1 && add() == 2 ? 0 : 1;  // its own, and free
}

int main() {
  dsprof::watch_forks<&fall_silent>();
  dsprof::watch_forks<&fall_silent>();
  add();
  std::mutex mutex; std::condition_variable changed; bool held = false, over = false;
  std::thread other([&] {
    std::lock_guard<std::mutex> held_for_good(counted().mutex);
    std::unique_lock<std::mutex> lock(mutex);
    held = true; changed.notify_all();
    changed.wait(lock, [&] { return over; });
  });
  { std::unique_lock<std::mutex> lock(mutex); changed.wait(lock, [&] { return held; }); }
  const pid_t pid = fork();
  if (!pid) {
    if (child()) _exit(1);
    const pid_t next = fork();  // and a child of the child
    if (!next) _exit(add() == 1 ? 0 : 1);
    int status = 1; waitpid(next, &status, 0);
    _exit(status ? 1 : 0);
  }
  int status = 1; waitpid(pid, &status, 0);
  { std::lock_guard<std::mutex> lock(mutex); over = true; }
  changed.notify_all();
  other.join();
  return status || silent || add() != 2;
}
"""


def test_a_lock_that_another_thread_holds_is_not_the_childs(tmp_path: Path) -> None:
    program = compile_program(HELD, tmp_path)
    assert subprocess.run([program], timeout=120, check=False).returncode == 0


def test_whatever_has_a_lock_is_made_anew_in_a_child() -> None:
    """But what belongs to a recorder: a child never asks its parent's."""
    for path in NATIVE.glob("*.hpp"):
        text = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"static\s+std::\w*mutex", text), path.name
        for found in re.findall(r"static auto\* instance = new (\w+)", text):
            assert f"class {found}" not in text or not re.search("mutex|SideThread", text), f"{path.name}: {found}"


FORKS = r"""
import os, signal, sys, threading
import torch, torch.distributed as dist
from dsprof.collectors import native

folder, count = sys.argv[1], int(sys.argv[2])
helper = native.load()
os.mkdir(f"{folder}/parent")
recorder = helper.open(f"{folder}/parent")
recorder.install_collectives({"allreduce_": "all_reduce"})
named = {}
def name_all(module):
    for name, one in module.named_modules():
        recorder.name_module(id(one), recorder.intern(name or "all"))
recorder.install_modules(name_all, lambda *args, **kwargs: None)
recorder.start_counting()
store = dist.FileStore(f"{folder}/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

layers = [torch.nn.Linear(8, 8) for _ in range(3)]  # to make one in a child would take a lock of torch's

def communicate(begun):
    tensor = torch.ones(4)
    while going.wait() and not over.is_set():
        dist.all_reduce(tensor)
        begun.set()

def train(begun, layer):
    while going.wait() and not over.is_set():
        layer(torch.ones(2, 8)).sum().backward()
        begun.set()

def work(place):
    # What the child does that forks for itself: hooks that are off, then a capture of its own.
    begin = recorder.begin(5, 1)
    assert begin == 0, begin
    recorder.renew_groups()
    recorder.stop_counting()
    layer = layers[2]
    layer(torch.ones(2, 8))
    os.mkdir(place)
    mine = helper.open(place)
    mine.install_collectives({"allreduce_": "all_reduce"})
    mine.install_modules(name_all, lambda *args, **kwargs: None)
    mine.start_counting()
    group = mine.group("0")
    assert mine.number("0") == 0
    mine.comm(int(sys.argv[3]), mine.intern("all_reduce"), 1, 2, 1, 8, group, 0, -1, 7, 0, -1, -1, 0, 0)
    layer(torch.ones(2, 8))
    assert mine.stop_counting()[0]
    mine.lock_watch.start(f"{place}/stacks.txt", 60.0, 1.0)
    mine.lock_watch.feed(1)
    mine.lock_watch.stop()
    mine.close()

over, going = threading.Event(), threading.Event()
recorder.lock_watch.start(f"{folder}/stacks.txt", 60.0, 1.0)
begun = [threading.Event() for _ in range(4)]
calls = [(communicate,), (communicate,), (train, layers[0]), (train, layers[1])]
threads = [threading.Thread(target=call, args=(one, *args)) for one, (call, *args) in zip(begun, calls)]
for thread in threads:
    thread.start()
failed = 0
for number in range(count):
    going.set()
    for one in begun:  # all are at it, and stand still while the child is waited for
        one.wait()
    child = os.fork()
    going.clear()
    for one in begun:
        one.clear()
    if not child:
        signal.alarm(60)
        try:
            work(f"{folder}/child{number}")
        except BaseException as error:
            print(f"child {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
over.set()
going.set()
for thread in threads:
    thread.join()
recorder.close()
print(failed, recorder.errors)
sys.stdout.flush()
os._exit(0)
"""
CHILDREN = 40


def test_children_of_a_process_whose_threads_are_in_the_hooks(tmp_path: Path) -> None:
    """They fall silent, and can record into a capture of their own."""
    build_helper()
    done = forked_python.run(
        [sys.executable, "-c", FORKS, str(tmp_path), str(CHILDREN), str(int(Kind.COMM))],
        env=environment(PYTHONWARNINGS="ignore"), capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "0"], done.stderr[-4000:]
    for number in range(CHILDREN):
        rows = read_rows(tmp_path / f"child{number}")
        assert (rows[0].kind, rows[0].name, rows[0].group) == (Kind.COMM, "all_reduce", "0")
        threads = {row.thread for row in rows if row.kind is Kind.MODULE}
        assert len(threads) == 1
        assert threads != {row.thread for row in read_rows(tmp_path / "parent")[:1]}
    assert os.path.getsize(tmp_path / "parent" / "names.txt") > 0


IN_A_CALL = r"""
import os, signal, sys
import torch
from dsprof.collectors import native

folder = sys.argv[1]
helper = native.load()
os.mkdir(f"{folder}/parent")
recorder = helper.open(f"{folder}/parent")
recorder.install_modules(None, None)

class Forks(torch.nn.Module):
    def forward(self, x):
        self.child = os.fork()
        if not self.child:
            signal.alarm(60)
            os.mkdir(f"{folder}/child")
            self.mine = helper.open(f"{folder}/child")
            return x
        os._exit(os.waitpid(self.child, 0)[1] != 0)  # in its call

model = Forks()
model(torch.ones(2))
model.mine.close()
os._exit(0)
"""


def test_a_child_does_not_complete_what_its_parent_began(tmp_path: Path) -> None:
    """One that is forked in a call, and records for itself, returns from that call, too."""
    build_helper()
    command = [sys.executable, "-c", IN_A_CALL, str(tmp_path)]
    done = forked_python.run(command, env=environment(PYTHONWARNINGS="ignore"), capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = read_rows(tmp_path / "parent")
    assert (row.name, row.state) == ("forward", State.BEGUN)
    assert read_rows(tmp_path / "child") == []
