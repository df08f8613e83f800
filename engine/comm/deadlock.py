"""Ranks that wait for each other for ever: noticed, and reported on each with what it waits for, instead of a time-out.

In stage 3 every rank must run the same modules in the same order, since each has a shard of all parameters. Where a
branch depends on the data, one rank waits for parameters that another never gathers. Their gathers do not mix (a
gather's content is its messages' tag, see `Comm.all_gather`), so both stop. Nothing is checked, and nothing sent, as
long as nobody waits for long. Who does, posts what it waits for, and what it has begun, in the job's store, and looks
what the others have posted there. That is enough to prove a deadlock, of however old posts: each says that something
does not happen before something else has, and what is before itself never happens.

A rank whose backward or step has failed half-way posts that, too, and what it will not begin before all ranks have come
to begin anew: who waits for that on it, and so never comes there, waits for ever.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Final

import torch.distributed as dist

from ..hooks import DEADLOCK, Hooks
from .comm import Comm, break_connections
from .consensus import LostError

PATIENCE_S: Final = 2.0
"""How long a wait takes before anybody thinks of it."""
LOOK_S: Final = 0.25
"""The first look at the others' posts; later ones are further apart, up to MOST_S."""
MOST_S: Final = 5.0
SHARE_S: Final = 5.0
"""How long a rank that has seen a deadlock leaves to others to see it too, before it breaks the connections."""

NORM: Final = "norm"
"""The one that is not on a lane."""
RECOVERY: Final = "recovery"
"""What all ranks do together, and communicate nothing for, after a backward or step that has failed half-way."""


@dataclass(frozen=True, slots=True)
class Front:
    """How far a rank is in one kind of communication, that of `ranks`."""

    ranks: Sequence[int]
    begun: int
    """How many it has begun. They end in order."""
    oldest: int | None = None
    """The number of the first that has not ended."""
    tag: int = 0
    names: Sequence[str] = ()
    """What the oldest brings."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank says of itself while it waits for `kind`: it begins nothing before that is over. "": it does not wait
    now, but has failed."""

    kind: str
    fronts: Mapping[str, Front]
    failed: str = ""
    """In what, and the error, if it has; then it begins nothing of the kinds `withheld` before the next recovery."""
    withheld: Sequence[str] = ()
    replaced: str = ""
    """Which functions of torch have been replaced in this process."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Post:
        content = json.loads(text)
        fronts = {kind: Front(**front) for kind, front in content.pop("fronts").items()}
        return Post(fronts=fronts, **content)

    def before(self, kind: str) -> set[str]:
        """What this rank waits for before it begins anything of `kind`."""
        return ({self.kind} if self.kind else set()) | ({RECOVERY} if kind in self.withheld else set())


def stuck(posts: Mapping[int, Post]) -> set[int]:
    """Those of the ranks that have posted whose wait cannot end.

    A rank waits for the oldest of its kind. That waits for each rank that has not begun it, and for each whose own
    oldest of this kind is an earlier one; with a rank that gathers something else at the same place it never ends.
    """
    never: set[tuple[int, str]] = set()
    waits_for: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for rank, post in posts.items():
        for kind, front in post.fronts.items():
            here = waits_for[rank, kind] = set()
            if front.oldest is None:
                continue
            for other in front.ranks:
                if other == rank or other not in posts or kind not in posts[other].fronts:
                    continue
                theirs = posts[other].fronts[kind]
                if theirs.begun <= front.oldest:
                    here |= {(other, before) for before in posts[other].before(kind)}
                elif theirs.oldest is not None and theirs.oldest < front.oldest:
                    here.add((other, kind))
                elif theirs.oldest == front.oldest and theirs.tag != front.tag:
                    never.add((rank, kind))
    # What can end, if only what is certain keeps it: take those away that wait for nothing, again and again.
    ends = {place for place, others in waits_for.items() if not others and place not in never}
    while more := {
        place for place, others in waits_for.items() if place not in ends | never and others <= ends
    }:  # fmt: skip
        ends |= more
    return {rank for rank, post in posts.items() if (rank, post.kind or RECOVERY) not in ends}


class DeadlockWatch:
    """Waits for the communications of one rank with the others of `comms`, gloo groups whose lanes are threads."""

    def __init__(self, comms: Mapping[str, Comm], hooks: Hooks) -> None:
        """`comms`: by the name of what they bring; of the first all ranks are members."""
        self._hooks = hooks
        group = next(iter(comms.values())).group
        assert group is not None
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"dsprof/waits/{group.group_name}"
        self._everyone = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        # A lane leads here, and must not lead back to itself: it ends with the engine that is dropped.
        self._comms = {kind: weakref.ref(comm) for kind, comm in comms.items()}
        self._ranks = {
            kind: dist.get_process_group_ranks(comm.group) for kind, comm in comms.items() if comm.group is not None
        }
        self.replaced: Callable[[], str] = str
        """Names the functions of torch that this rank runs otherwise than others may."""
        self._norms = 0
        self._recoveries = 0
        self._failed = ""
        self._withheld: Sequence[str] = ()
        self._error: LostError | None = None
        self._store.set(f"{self._key}/{self._rank}", "")  # what there may be of an earlier job in the same store
        self._store.delete_key(f"{self._key}/{self._rank}/saw")
        for kind, comm in comms.items():
            comm.watch(partial(self._until, kind))

    # --- after a backward or a step that has failed half-way

    def failed(self, why: str, withheld: Sequence[str]) -> None:
        """This rank has failed half-way: it begins nothing of the kinds `withheld` before all ranks begin anew."""
        self._failed, self._withheld = why, withheld
        with suppress(dist.DistError):
            self._store.set(f"{self._key}/{self._rank}", self._post("").dump())

    def recover(self, begun: int) -> None:
        """Wait until all ranks are here. Each says how much it had `begun` of what has failed.

        Raises LostError on all ranks if some never come, or have begun more than others."""
        number, self._recoveries = self._recoveries, self._recoveries + 1
        keys = {rank: f"{self._key}/{RECOVERY}/{number}/{rank}" for rank in self._everyone}
        self._store.set(keys[self._rank], str(begun))

        def over(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while not self._store.check(list(keys.values())):
                if time.monotonic() > until:
                    return False
                time.sleep(0.005)
            return True

        self._until(RECOVERY, over)
        found = {rank: int(self._store.get(key)) for rank, key in keys.items()}
        self._withdraw()
        if len(set(found.values())) > 1:
            listed = ", ".join(f"rank {rank} {count}" for rank, count in found.items())
            self._error = LostError(
                "a backward failed at different places, and what the ranks have sent each other of it does not match "
                f"(buckets of gradients: {listed}): end the job, and start it again from a checkpoint"
            )
            self._abort()
            raise self._error

    def recovered(self) -> None:
        """All ranks have begun anew by communicating, as a load does."""
        self._recoveries += 1
        self._withdraw()

    def _withdraw(self) -> None:
        if self._failed:
            self._failed, self._withheld = "", ()
            with suppress(dist.DistError):
                self._store.set(f"{self._key}/{self._rank}", "")

    # --- waits

    def wait(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        """Wait for a collective beside the lanes, one at a time and all ranks': the norm. Raises as all waits do."""
        self._norms += 1

        def over(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if work.is_completed():
                    raise
                return False
            return True

        try:
            self._until(NORM, over)
        except BaseException:
            if self._error is not None:
                break_connections(group)
            raise

    def _until(self, kind: str, over: Callable[[float], bool]) -> None:
        """Raises LostError, on all ranks that it concerns, if `over` will never be true."""
        if self._error is not None:
            raise self._error
        if over(PATIENCE_S):
            return
        posted, pause = "", LOOK_S
        while not over(pause):
            pause = min(1.5 * pause, MOST_S)
            post = self._post(kind)
            try:
                if (text := post.dump()) != posted:
                    self._store.set(f"{self._key}/{self._rank}", text)
                    posted = text
                if self._rank not in stuck({**self._posts(), self._rank: post}):
                    continue
                self._let_others_see()
                posts = {**self._posts(), self._rank: post}
            except dist.DistError:  # the store's host has ended, which the connections will show
                continue
            self._error = _error_of({rank: posts[rank] for rank in sorted(stuck(posts))})
            self._hooks.mark(f"{DEADLOCK}{self._error}")
            self._abort()
            raise self._error

    def _abort(self) -> None:
        assert self._error is not None
        for ref in self._comms.values():
            comm = ref()
            if comm is not None:
                comm.abort(self._error)

    def _post(self, kind: str) -> Post:
        fronts = {}
        for name, ref in self._comms.items():
            comm = ref()
            assert comm is not None
            under_way, ranks = comm.under_way, self._ranks[name]
            fronts[name] = Front(ranks, comm.begun)
            if under_way is not None:
                content = under_way.content
                about = () if content is None else (content.tag, content.names)
                fronts[name] = Front(ranks, comm.begun, under_way.seq, *about)
        fronts[NORM] = Front(self._everyone, self._norms, self._norms - 1 if kind == NORM else None)
        here = kind == RECOVERY
        awaited = self._recoveries - here if here or self._failed else None
        fronts[RECOVERY] = Front(self._everyone, self._recoveries, awaited)
        return Post(kind, fronts, self._failed, self._withheld, self.replaced())

    def _posts(self) -> dict[int, Post]:
        found = {}
        for rank in self._everyone:
            key = f"{self._key}/{rank}"
            if rank != self._rank and self._store.check([key]):
                text = self._store.get(key).decode()
                if text:
                    found[rank] = Post.load(text)
        return found

    def _let_others_see(self) -> None:
        """They look at the store, too, as long as nothing fails; with the first rank that ends everything does."""
        self._store.set(f"{self._key}/{self._rank}/saw", "")
        until = time.monotonic() + SHARE_S
        away = {rank for rank, post in self._posts().items() if not post.kind}  # those that do not wait do not look
        keys = [f"{self._key}/{rank}/saw" for rank in self._everyone if rank not in away]
        while time.monotonic() < until and not self._store.check(keys):
            time.sleep(0.05)


def _error_of(posts: Mapping[int, Post]) -> LostError:
    waits = "; ".join(f"rank {rank} waits for {_what(post)}" for rank, post in posts.items() if post.kind)
    if failed := [f"rank {rank} has failed in {post.failed}" for rank, post in posts.items() if post.failed]:
        return LostError(
            f"{'; '.join(failed)}. The ranks now wait for each other: {waits}. What fails half-way on one rank alone "
            "ends the training: end the job, and start it again from a checkpoint"
        )
    if not any(front.names for post in posts.values() for front in post.fronts.values()):
        return LostError(
            f"the ranks now wait for each other: {waits}. All must call the engine's methods equally often and in the "
            "same order. The training cannot go on"
        )
    if len({post.replaced for post in posts.values()}) > 1:
        waits += "".join(f"; on rank {r} {post.replaced} was replaced" for r, post in posts.items() if post.replaced)
    return LostError(
        f"ZeRO stage 3: the ranks ran different modules, and now wait for each other: {waits}. Every rank has a shard "
        "of all parameters, so all must run the same modules in the same order: where the data decide, run the branch "
        "on all ranks (times 0 where it is not wanted), or write a lower stage. The training cannot go on"
    )


def _what(post: Post) -> str:
    front = post.fronts[post.kind]
    if front.names:
        names = list(front.names[:4]) + (["..."] if len(front.names) > 4 else [])
        return f"the parameters {', '.join(names)}" if len(names) > 1 else f"the parameter {names[0]}"
    return {NORM: "the norm of the gradients", RECOVERY: "all ranks to begin the step anew"}.get(
        post.kind, f"the {post.kind}"
    )
