"""A made-up run of dp x tp x pp x ep ranks, as `dsprof run` leaves one: run.json and one Parquet file a rank.

Each stage of the pipeline has one layer: attention, whose activations the tensor-parallel ranks reduce, and experts,
with whom the ranks of an expert-parallel group exchange tokens before and after. Micro-batches go through the stages by
1F1B; a rank asks for a message as soon as it has the one before, and does not wait for what it sends. At the end of a
step gradients are reduced over the replicas, those of experts over theirs, and all ranks reduce the gradients' norm.

Ranks are numbered as Megatron does: tp changes fastest, then ep, then the replicas of experts, then pp. A host has
eight of them, so that tp and ep stay within one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from made_up_run import FIRST_NS, LATER_OF_ALL, MS, RANKS_A_HOST, US, Plant, Rows, write_rank

ATTENTION_MS, EXPERTS_MS = 4.0, 4.0
"""What forward takes of a micro-batch in a stage; backward takes twice as long."""
MESSAGE_MS, REDUCE_MS, EXCHANGE_MS = 0.3, 0.15, 0.3
DENSE_MS, SPARSE_MS, NORM_MS, OPTIMIZER_MS, DATA_MS = 3.0, 2.0, 0.1, 5.0, 2.0
JITTER = 0.02
ELEMENTS, WIDTH = 4096, 64
"""Of a micro-batch of length 1, and times as many of its activations."""
MESSAGE_BYTES, REDUCE_BYTES, EXCHANGE_BYTES, DENSE_BYTES, SPARSE_BYTES = 1 << 20, 1 << 20, 1 << 19, 24 << 20, 8 << 20
FORWARD, BACKWARD = "F", "B"
TP, EP = "tp", "ep"


@dataclass(frozen=True)
class Mesh:
    """tp: ranks that share each layer; ep: ranks whose experts differ; replicas: of each expert; pp: stages;
    microbatches: of a step."""

    tp: int
    ep: int
    replicas: int
    pp: int
    microbatches: int

    @property
    def of_stage(self) -> int:
        """Ranks of a stage."""
        return self.tp * self.ep * self.replicas

    @property
    def ranks(self) -> int:
        return self.of_stage * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.of_stage

    def grid(self, values: np.ndarray) -> np.ndarray:
        """Values of a stage's ranks [..., R] as [..., replicas, ep, tp]."""
        return values.reshape(*values.shape[:-1], self.replicas, self.ep, self.tp)

    def groups_of(self, rank: int) -> dict[str, tuple[str, list[int]]]:
        """What for -> the name and the ranks of the group in which a rank does it."""
        stage, place = divmod(rank, self.of_stage)
        replica, rest = divmod(place, self.tp * self.ep)
        expert, part = divmod(rest, self.tp)
        first, host = stage * self.of_stage, self.tp * self.ep
        found = {
            "world": ("0", list(range(self.ranks))),
            "dense": (f"dp{stage}.{part}", list(range(first + part, first + self.of_stage, self.tp))),
            "pipe": (f"pp{place}", list(range(place, self.ranks, self.of_stage))),
        }
        if self.tp > 1:
            begin = rank - part
            found[TP] = f"tp{rank // self.tp}", list(range(begin, begin + self.tp))
        if self.ep > 1:
            begin = first + replica * host + part
            found[EP] = f"ep{stage}.{replica}.{part}", list(range(begin, begin + host, self.tp))
            if self.replicas > 1:
                copies = list(range(first + expert * self.tp + part, first + self.of_stage, host))
                found["sparse"] = f"edp{stage}.{expert}.{part}", copies
        return found


@dataclass(frozen=True)
class MeshPlant(Plant):
    """What is planted beside that, by rank, step and micro-batch [R, S, M], or what broadcasts to that.

    lengths: of each micro-batch, 1 in the mean; the same on all stages that it passes and all ranks that share it
    tokens:  how many of them a rank's experts get, of an equal share
    message: how many times as long messages are under way between a rank and that of the next stage, [R, 1]
    """

    lengths: np.ndarray = field(default_factory=lambda: np.ones((1, 1, 1)))
    tokens: np.ndarray = field(default_factory=lambda: np.ones((1, 1, 1)))
    message: np.ndarray = field(default_factory=lambda: np.ones((1, 1)))


@dataclass(frozen=True)
class Call:
    """A collective of a stage's ranks in one action, [S, R] ns."""

    what: str
    issue: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Message:
    """From another stage, [S, R] ns: when it was sent, asked for, waited for, and there."""

    sent: np.ndarray
    asked: np.ndarray
    waited: np.ndarray
    there: np.ndarray


class MeshTimeline:
    """When what happens, in ns on one clock: what each rank computes is drawn, the rest follows from it."""

    def __init__(self, mesh: Mesh, steps: int, seed: int, plant: MeshPlant) -> None:
        from dsprof.engine.schedule import make_plan

        self.mesh, self.steps, self.plant = mesh, steps, plant
        self.actions = make_plan("1f1b", mesh.pp, mesh.microbatches).actions
        shape = mesh.pp, steps, mesh.of_stage
        every = mesh.ranks, steps, mesh.microbatches
        self._draw = np.random.default_rng(seed)

        def of_stages(values: np.ndarray) -> np.ndarray:
            """[R, S, ...] as [stage, S, R of stage, ...]."""
            found = values.reshape(mesh.pp, mesh.of_stage, *values.shape[1:])
            return np.moveaxis(found, 1, 2)

        self.lengths = of_stages(np.broadcast_to(plant.lengths, every))
        shared = mesh.grid(np.moveaxis(self.lengths, -1, 2)).mean(axis=-2, keepdims=True)
        shared = np.broadcast_to(shared, (*shared.shape[:-2], mesh.ep, mesh.tp)).reshape(*shape[:2], -1, shape[2])
        self.tokens = of_stages(np.broadcast_to(plant.tokens, every)) * np.moveaxis(shared, 2, -1)
        self._work = of_stages(np.broadcast_to(plant.work, every[:2]))
        self._tail = of_stages(np.broadcast_to(plant.tail_ns, (mesh.ranks, 1)))
        hosts = -(-mesh.ranks // RANKS_A_HOST)
        link = np.repeat(np.broadcast_to(plant.link, (hosts, steps)), RANKS_A_HOST, axis=0)[: mesh.ranks]
        self._link = of_stages(link)
        self._message = of_stages(np.broadcast_to(plant.message, (mesh.ranks, 1)))
        self._pause = of_stages(np.broadcast_to(plant.pause_ms, every[:2])) * MS
        self._draws = self._draw.standard_normal((mesh.pp, len(self.actions[0]), 2, *shape[1:]))
        self.begin, self.loaded, self.trained, self.done, self.finish = (np.zeros(shape) for _ in range(5))
        self.began = [[np.zeros(shape[1:]) for _ in of] for of in self.actions]
        self.ended = [[np.zeros(shape[1:]) for _ in of] for of in self.actions]
        self.calls: list[list[list[Call]]] = [[[] for _ in of] for of in self.actions]
        self.messages: dict[tuple[int, int], Message] = {}
        self.sent: dict[tuple[int, str, int], Message] = {}
        """(stage, action, micro-batch) of who sent it."""
        self.dense, self.sparse, self.norm = (np.zeros((2, *shape)) for _ in range(3))
        for step in range(steps):
            self._run(step)

    def _tails(self, stage: int, times: float = 1.0) -> np.ndarray:
        found: np.ndarray = times * self._tail[stage, 0] * self._draw.random(self.mesh.of_stage)
        return found

    def _run(self, step: int) -> None:
        mesh = self.mesh
        before = np.full((mesh.pp, mesh.of_stage), FIRST_NS) if step == 0 else self.finish[:, step - 1]
        self.begin[:, step] = now = before + 20 * US
        loads = DATA_MS * MS * np.maximum(1 + 0.2 * self._draw.standard_normal(mesh.of_stage), 0.2)
        # The ranks that share a layer take the same batch.
        loads = np.repeat(mesh.grid(loads)[..., 0].ravel(), mesh.tp)
        now[0] += loads + np.broadcast_to(self.plant.data_ms, (mesh.ranks, self.steps))[: mesh.of_stage, step] * MS
        self.loaded[:, step] = now
        asked = {(stage, op): now[stage] + 10 * US for stage in range(mesh.pp) for op in (FORWARD, BACKWARD)}
        now = [of + 20 * US for of in now]
        sent: dict[tuple[int, str, int], np.ndarray] = {}
        reached = [0] * mesh.pp
        while any(at < len(of) for at, of in zip(reached, self.actions, strict=True)):
            for stage in range(mesh.pp):
                while reached[stage] < len(self.actions[stage]):
                    number = reached[stage]
                    action = self.actions[stage][number]
                    source = stage - 1 if action.op == FORWARD else stage + 1
                    if 0 <= source < mesh.pp:
                        key = source, action.op, action.microbatch
                        if key not in sent:
                            break
                        waited, mine = now[stage], asked[stage, action.op]
                        took = MESSAGE_MS * MS * (1 + 0.1 * self._draw.random(mesh.of_stage))
                        took *= self._message[min(stage, source), 0]
                        there = np.maximum(sent[key], mine) + took + self._tails(stage)
                        self._set(stage, number, key, step, sent[key], mine, waited, there)
                        now[stage] = asked[stage, action.op] = np.maximum(waited, there) + 2 * US
                    now[stage] = self._act(step, stage, number, now[stage])
                    sent[stage, action.op, action.microbatch] = now[stage]
                    reached[stage] += 1
        self._end(step, np.array(now))

    def _set(self, stage: int, number: int, key: tuple[int, str, int], step: int, *times: np.ndarray) -> None:
        found = self.messages.get((stage, number))
        if found is None:
            empty = (np.zeros((self.steps, self.mesh.of_stage)) for _ in range(4))
            found = self.messages[stage, number] = self.sent[key] = Message(*empty)
        for values, of_step in zip((found.sent, found.asked, found.waited, found.there), times, strict=True):
            values[step] = of_step

    def _act(self, step: int, stage: int, number: int, now: np.ndarray) -> np.ndarray:
        """An action of a stage, from `now` on; when it ends."""
        mesh, action = self.mesh, self.actions[stage][number]
        self.began[stage][number][step] = now
        times = 1.0 if action.op == FORWARD else 2.0
        draws = np.maximum(1 + JITTER * self._draws[stage, number, :, step], 0.2) * self._work[stage, step] * times
        attention = ATTENTION_MS * MS * draws[0] * self.lengths[stage, step, :, action.microbatch]
        experts = EXPERTS_MS * MS * draws[1] * self.tokens[stage, step, :, action.microbatch]
        parts: list[Any] = [attention, TP, EP, experts, EP]
        if mesh.ep == 1:
            parts = [attention + experts, TP]
        if action.op == BACKWARD:
            parts = parts[::-1]
        if number == 0:
            now = now + self._pause[stage, step]
        calls = 0
        for part in parts:
            if not isinstance(part, str):
                now = now + part
                continue
            if part == TP and mesh.tp == 1:
                continue
            last = np.broadcast_to(
                mesh.grid(now).max(axis=-1 if part == TP else -2, keepdims=True), mesh.grid(now).shape
            ).ravel()
            took = (REDUCE_MS if part == TP else EXCHANGE_MS) * MS * (1 + 0.1 * self._draw.random())
            end = last + took * self._link[stage, step] + self._tails(stage)
            of_action = self.calls[stage][number]
            if len(of_action) == calls:
                of_action.append(Call(part, *(np.zeros((self.steps, mesh.of_stage)) for _ in range(2))))
            of_action[calls].issue[step], of_action[calls].end[step] = now, end
            calls += 1
            now = end + 6 * US
        self.ended[stage][number][step] = now
        return now + 10 * US

    def _end(self, step: int, now: np.ndarray) -> None:
        """Gradients, their norm, and the optimizer."""
        mesh = self.mesh
        self.trained[:, step] = now
        for stage in range(mesh.pp):
            grid = mesh.grid(now[stage])
            tails = [mesh.grid(self._tails(stage, LATER_OF_ALL)) for _ in range(2)]
            dense = grid.max(axis=(0, 1), keepdims=True) + DENSE_MS * MS + tails[0]
            self.dense[:, stage, step] = now[stage], dense.ravel()
            both = np.maximum(grid, dense)
            if mesh.ep > 1 and mesh.replicas > 1:
                sparse = grid.max(axis=0, keepdims=True) + 20 * US + SPARSE_MS * MS + tails[1]
                self.sparse[:, stage, step] = now[stage] + 20 * US, sparse.ravel()
                both = np.maximum(both, sparse)
            self.norm[0, stage, step] = both.ravel() + 30 * US
        end = self.norm[0, :, step].max() + NORM_MS * MS
        self.norm[1, :, step] = [end + self._tails(stage, LATER_OF_ALL) for stage in range(mesh.pp)]
        self.done[:, step] = self.norm[1, :, step] + 10 * US
        optimizer = OPTIMIZER_MS * MS * np.maximum(1 + JITTER * self._draw.standard_normal(now.shape), 0.2)
        self.finish[:, step] = self.done[:, step] + optimizer

    def lasted_ms(self) -> np.ndarray:
        """Each step, [S], of the rank that ends it last."""
        return np.diff(self.finish.max(axis=(0, 2)), prepend=FIRST_NS) / MS


def rank_rows(line: MeshTimeline, rank: int) -> Any:
    """The rows of one rank as a table of Arrow, in order of start, on the clock of its host."""
    mesh = line.mesh
    stage, place = divmod(rank, mesh.of_stage)
    groups = {what: name for what, (name, _) in mesh.groups_of(rank).items()}
    rows, step = Rows(line.steps), np.arange(line.steps)[:, None]
    add = rows.add

    def call(
        name: str, what: str, issue: np.ndarray, end: np.ndarray, number: int, of_step: int, *,
        after: np.ndarray | None = None, purpose: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """A collective that is waited for at once, or after another."""
        about = {"group": groups[what], "seq": step * of_step + number, "purpose": purpose}
        add("comm", name, issue + 5 * US, end, issue=issue[:, None], lane=f"comm.{groups[what]}", **about, **more)
        waits = (issue if after is None else np.maximum(issue, after)) + 8 * US
        add("wait", name, waits, np.maximum(end, waits) + 4 * US, **about)

    begin, finish = line.begin[stage, :, place], line.finish[stage, :, place]
    add("step", "step", begin, finish, source="derived")
    if stage == 0:
        add("phase", "data", begin, line.loaded[stage, :, place], value=1.0)
    counted = {TP: 0, EP: 0}
    of_step = {what: sum(one.what == what for of in line.calls[stage] for one in of) for what in counted}
    for number, action in enumerate(line.actions[stage]):
        acts = {"stage": stage, "microbatch": action.microbatch}
        if (message := line.messages.get((stage, number))) is not None:
            peer = stage - 1 if action.op == FORWARD else stage + 1
            about = {"group": groups["pipe"], "seq": step * mesh.microbatches + action.microbatch, "peer": peer,
                     "tag": 0, "purpose": "pipeline", **acts}  # fmt: skip
            asked, waited, there = (of[:, place] for of in (message.asked, message.waited, message.there))
            add("comm", "recv", asked + 2 * US, there, issue=asked[:, None], lane=f"comm.{groups['pipe']}",
                bytes=MESSAGE_BYTES, **about)  # fmt: skip
            add("wait", "recv", waited, np.maximum(waited, there) + US, **about)
        began, ended = line.began[stage][number][:, place], line.ended[stage][number][:, place]
        add("pipe", action.op, began, ended, depth=1, **acts)
        if action.op == FORWARD:
            given = np.round(ELEMENTS * line.lengths[stage, :, place, action.microbatch])[:, None]
            given = given * (WIDTH if stage else 1)
            add("phase", "forward", began + 5 * US, ended - 2 * US, depth=2, value=given, grad=True)
        else:
            add("phase", "backward", began + 5 * US, ended - 2 * US, depth=2)
        for one in line.calls[stage][number]:
            issue, end, what = one.issue[:, place], one.end[:, place], one.what
            if what == TP:
                call("all_reduce", TP, issue, end, counted[TP], of_step[TP], purpose="tensor-parallel",
                     bytes=REDUCE_BYTES, **acts)  # fmt: skip
            else:
                mine = np.maximum(*(of[stage, :, place, action.microbatch] for of in (line.lengths, line.tokens)))
                call("all_to_all", EP, issue, end, counted[EP], of_step[EP],
                     bytes=np.round(EXCHANGE_BYTES * mine)[:, None], **acts)  # fmt: skip
            counted[what] += 1
        if (message := line.sent.get((stage, action.op, action.microbatch))) is not None:
            peer = stage + 1 if action.op == FORWARD else stage - 1
            sent, there = message.sent[:, place], message.there[:, place]
            add("comm", "send", sent + 2 * US, np.maximum(there, sent + 10 * US), issue=sent[:, None],
                lane=f"comm.{groups['pipe']}", bytes=MESSAGE_BYTES, group=groups["pipe"], purpose="pipeline",
                seq=step * mesh.microbatches + action.microbatch, peer=peer, tag=0, **acts)  # fmt: skip
    issue, end = line.dense[:, stage, :, place]
    call("all_reduce", "dense", issue, end, 0, 1, purpose="gradient", bytes=DENSE_BYTES)
    if "sparse" in groups:
        issue, after = line.sparse[:, stage, :, place]
        call("all_reduce", "sparse", issue, after, 0, 1, purpose="gradient", bytes=SPARSE_BYTES, after=end)
    issue, end = line.norm[:, stage, :, place]
    call("all_reduce", "world", issue, end, 0, 1, purpose="norm", bytes=4)
    add("phase", "optimizer", line.done[stage, :, place], finish, value=1.0)
    pause = np.broadcast_to(line.plant.pause_ms, (mesh.ranks, line.steps))[rank] * MS
    if pause.all():
        first = line.began[stage][0][:, place] + 20 * US
        add("pause", "gc", first, first + pause, value=2.0)
    spent = np.cumsum(finish - begin) / 1e9
    for gauge, share in (("cpu_seconds", 1.2), ("training_thread_cpu_seconds", 0.8), ("core_wait_seconds", 0.01)):
        add("gauge", gauge, finish, finish, value=(spent * share)[:, None])
    return rows.table(rank, line.plant)


def make_mesh_run(
    folder: Path, mesh: Mesh, steps: int, seed: int, plant: MeshPlant, missing: Iterable[int] = ()
) -> MeshTimeline:
    """A run folder with its run.json and traces, and no captures. Of ranks that are missing there is no trace; those
    that were made already, by a call that was interrupted, stay."""
    from dsprof.run import RankInfo, RunInfo

    line = MeshTimeline(mesh, steps, seed, plant)
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    info = RunInfo(id=folder.name, name="made-up", command=["dsprof", "run", "train.py"], world_size=mesh.ranks)
    (folder / "run.json").write_text(info.to_json())
    for rank in sorted({*range(mesh.ranks)} - {*missing}):
        target = folder / "trace" / f"rank{rank:05d}.parquet"
        if target.exists():
            continue
        host, at = divmod(rank, RANKS_A_HOST)
        about = RankInfo(rank, 0, f"host{host}", 100 + rank, "", True, steps - 1, 0, 0, 0, 0, True)
        facts: list[dict[str, Any]] = [
            {"fact": "process", "rank": rank, "script": "train.py", "cpus": [2 * at, 2 * at + 1], "threads": 1},
            {"fact": "pipeline", "rank": rank, "schedule": "Schedule1F1B", "microbatches": mesh.microbatches,
             "stages": mesh.pp, "stage_indices": [mesh.stage(rank)], "trains": True, "site": "train.py:29"},
            *(
                {"fact": "group", "rank": rank, "name": name, "ranks": ranks, "desc": what, "backend": "gloo"}
                for what, (name, ranks) in mesh.groups_of(rank).items()
            ),
        ]  # fmt: skip
        write_rank(target, rank_rows(line, rank), about, facts, mesh.ranks)
    return line
