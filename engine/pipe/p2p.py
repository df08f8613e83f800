"""What stages send each other: messages of tensors, each direction on lanes of its own.

A message says itself what is in it, so shapes may differ from one micro-batch to the next, and a rank that fails can
notify its neighbours, who would wait for it otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.comm import break_connections, close_group, open_group, open_host_group, pass_on, wait_all
from ..comm.lane import CpuLane, Ticket, open_lane
from ..comm.mesh import Mesh
from ..hooks import Attributes, Hooks, Position
from ..tree import SEVERAL, SINGLE, form_of

Direction = Literal["F", "B"]
"""Activations to the next stage, or their gradients to the one before."""

AHEAD: Final[Mapping[Direction, int]] = {"F": 1, "B": -1}
"""Stages, or ranks, from the sender to the receiver."""

HEADER: Final = 128
"""Numbers at the head of a message."""
FAILED: Final = -1
PLAIN: Final = (SEVERAL, SINGLE)
"""Forms that a head has room for; others follow it."""
DTYPES: Final = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


class PipelineError(RuntimeError):
    """A stage failed; the message names it and says why."""


class PeerError(PipelineError):
    """Another rank failed, and said so."""


@dataclass(slots=True)
class Message:
    """What a stage passes to another: its output, or the gradients of what it got."""

    tensors: list[Tensor]
    wanted: list[bool]
    """Of each tensor, whether a gradient is to come back."""
    form: str = SEVERAL
    """How the tensors lie in the output: see `tree.form_of`."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def message_of(output: Any, what: str) -> Message:
    """`output` as what can be sent. Raises PipelineError, beginning with `what`, if it cannot be."""
    try:
        shape, tensors = form_of(output)
    except TypeError as error:
        raise PipelineError(
            f"{what} returned {error}, which cannot be sent to the next stage; return tensors, in tuples, lists or "
            "dicts if there are several, or divide the layers elsewhere"
        ) from None
    for tensor in tensors:
        kind = _unsendable(tensor)
        if kind is not None:
            raise PipelineError(
                f"{what} returned {kind}, which cannot be sent to the next stage; return what is in it as plain "
                "tensors, or divide the layers elsewhere"
            )
    if 3 + sum(3 + tensor.dim() for tensor in tensors) > HEADER:
        raise PipelineError(f"{what} returned {len(tensors)} tensors, more than a message holds; stack some of them")
    return Message(tensors, [tensor.requires_grad for tensor in tensors], shape)


@dataclass(slots=True)
class Arrival:
    """A message on its way here."""

    head: Ticket
    """Of what says how large it is."""
    rest: Callable[[], Ticket]
    """Starts receiving the rest, when that is here."""
    box: list[Message]
    ticket: Ticket | None = None
    """Of the rest."""

    def advance(self) -> None:
        """Have it received as soon as it is there: its head may be here by now. Waits for nothing."""
        if self.ticket is None and self.head.done:
            self.ticket = self.rest()

    @property
    def done(self) -> bool:
        """Whether it can be taken without waiting."""
        self.advance()
        return self.ticket is not None and self.ticket.done

    def wait(self) -> None:
        """Return when it is here. Raises PipelineError if its sender failed instead."""
        self.head.wait()
        self.ticket = self.ticket or self.rest()
        self.ticket.wait()

    def take(self) -> Message:
        """The message, once it is here. Raises as `wait` does."""
        self.wait()
        message = self.box.pop()
        for tensor in message.tensors:
            if tensor.is_cuda:  # its memory is the lane's, which would give it to the next receive too early
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return message


class Link:
    """One direction between the ranks of a pipeline: what this rank sends, and what it gets, on a lane each."""

    def __init__(
        self,
        direction: Direction,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
        hooks: Hooks,
        name: str,
    ) -> None:
        """`host_group` has the same ranks and carries the heads of messages, which are in host memory."""
        self.group = group
        self._host_group = host_group
        self._device = device
        self._posted: list[tuple[dist.Work, Tensor]] = []
        """Heads on their way, with their memory, where the host does not wait for each."""
        self._ended: str | None = None
        """Why nothing more comes in this step."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._to, self._from = (rank + AHEAD[direction]) % size, (rank - AHEAD[direction]) % size
        self._out = open_lane(f"pipe.send_{name}", device, hooks)
        self._in = open_lane(f"pipe.recv_{name}", device, hooks)
        self._heads = self._in if isinstance(self._in, CpuLane) else CpuLane(f"pipe.head_{name}", Hooks())
        """Where heads are waited for: on a device by a thread, so that neither it nor the host waits. That is not
        reported, as is what follows."""
        self._counts: Counter[str] = Counter()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Of what is sent, and of its heads."""
        return self.group, self._host_group

    def send(self, message: Message, at: Position) -> Ticket:
        """Start sending. The tensors must not be written to before the ticket is done."""
        tensors = [tensor.detach().contiguous() for tensor in message.tensors]

        def work() -> None:
            heads = self._post(_heads(message, at))
            pass_on(self.group, [(_bytes(tensor), self._to) for tensor in tensors if tensor.numel()], [])
            wait_all(heads)

        return self._out.submit(work, "send", at, **self._attributes("send", self._to, message))

    def receive(self, at: Position) -> Arrival:
        """Have the next message received as soon as it is there: what is computed before need not be over. On a device
        that takes `Arrival.advance` now and then."""
        box: list[Message] = []
        about = self._attributes("recv", self._from)

        def read() -> None:
            if self._ended is not None:
                raise PeerError(self._ended)
            head = torch.empty(HEADER, dtype=torch.int64)
            wait_all([dist.irecv(head, group=self._host_group, group_src=self._from)])
            numbers = head.tolist()
            if numbers[0] == FAILED:
                self._ended = self._read(numbers[1])
                raise PeerError(self._ended)
            form = self._read(numbers[1] - len(PLAIN)) if numbers[1] >= len(PLAIN) else ""
            heads.append((numbers, form))

        def fill() -> None:
            ((numbers, form),) = heads
            message, microbatch = _empty(numbers, self._device)
            message.form = form or message.form
            pass_on(self.group, [], [(_bytes(tensor), self._from) for tensor in message.tensors if tensor.numel()])
            if microbatch != at[1]:
                raise PipelineError(
                    f"stage {at[2]} of the pipeline got micro-batch {microbatch} where its plan has {at[1]}: the "
                    "ranks' plans differ; configure the same schedule and number of micro-batches on all"
                )
            box.append(message)

        def both() -> None:
            read()
            fill()

        heads: list[tuple[list[int], str]] = []
        if self._heads is self._in:
            ticket = self._in.submit(both, "recv", at, fresh=True, **about)
            return Arrival(ticket, lambda: ticket, box)
        head = self._heads.submit(read, "recv", at)
        return Arrival(head, lambda: self._in.submit(fill, "recv", at, fresh=True, **about) if heads else head, box)

    def fail(self, reason: str, at: Position) -> Ticket:
        """In the place of the next message: say that no more will come in this step."""
        text = _text(reason)

        def work() -> None:
            head = torch.zeros(HEADER, dtype=torch.int64)
            head[0], head[1] = FAILED, text.numel()
            wait_all(self._post([head, text]))

        return self._out.submit(work, "send", at, **self._attributes("send", self._to))

    def begin(self) -> None:
        """A new step: messages come again, whatever became of the last."""
        self._ended = None

    def settle(self) -> None:
        """Wait until the heads of all messages have been read."""
        posted, self._posted = self._posted, []
        wait_all([work for work, _ in posted])

    def poll(self) -> None:
        """Report what has ended on a device since."""
        self._out.poll()
        self._in.poll()

    def abort(self) -> None:
        """Have the ranks at the other ends fail where they wait for this one."""
        break_connections(self.group)
        if self._host_group is not self.group:
            break_connections(self._host_group)

    def close(self) -> None:
        """End the lanes, and destroy the groups."""
        self._out.close()
        self._in.close()
        if self._heads is not self._in:
            self._heads.close()
        close_group(self.group)
        close_group(self._host_group)

    def _read(self, size: int) -> str:
        """The text that follows a head."""
        text = torch.empty(size, dtype=torch.uint8)
        wait_all([dist.irecv(text, group=self._host_group, group_src=self._from)])
        return bytes(text.tolist()).decode()

    def _post(self, parts: Sequence[Tensor]) -> Sequence[dist.Work | None]:
        """Send `parts`, which are in host memory; what is to be waited for.

        gloo's sends end when the receiver is there. A lane that is a thread waits for that. On a device it is the host
        that would, and 1F1B cannot go on if it does: it waits in `settle`, at the end of the step.
        """
        works = [dist.isend(part, group=self._host_group, group_dst=self._to) for part in parts]
        if isinstance(self._out, CpuLane):
            return works
        self._posted += [(work, part) for work, part in zip(works, parts, strict=True) if work is not None]
        return []

    def _attributes(self, name: str, peer: int, message: Message | None = None) -> Attributes:
        seq = self._counts[name]
        self._counts[name] += 1
        tensors = [] if message is None else message.tensors
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else None
        return {
            "purpose": "pipeline", "bytes": -1 if message is None else message.nbytes, "dtype": dtype,
            "group": self.group.group_name, "seq": seq, "peer": peer,
        }  # fmt: skip


Links = dict[tuple[Direction, bool], Link]
"""All links of a rank: to the neighbour, and where ranks have several stages, around the end: from last to first."""


def open_links(mesh: Mesh, device: torch.device, hooks: Hooks, *, wraps: bool) -> Links:
    """The links of this rank's pipeline. Every rank of the job must call this.

    Two ranks that send each other in both directions would wait for each other on a device if they had one group for
    that, so activations, gradients, and each of them around the end (`wraps`) have their own.
    """
    links: Links = {}
    for around in (False, True) if wraps else (False,):
        for direction in AHEAD if mesh.pp > 1 else ():
            group = open_group(mesh.sets("pp"))
            assert group is not None
            host = open_host_group(mesh.sets("pp"), group)
            name = direction + ("_around" if around else "")
            links[direction, around] = Link(direction, group, host, device, hooks, name)
    return links


def _unsendable(tensor: Tensor) -> str | None:
    """What `tensor` is that a message has no room for; None for plain numbers."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return "a sparse tensor"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a tensor of the class {type(tensor).__name__}"
    return None if tensor.dtype in DTYPES else f"a tensor of {tensor.dtype}"


def _text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _heads(message: Message, at: Position) -> list[Tensor]:
    """The head, and if the form is not a plain one its text, whose length the head has."""
    more = [] if message.form in PLAIN else [_text(message.form)]
    kind = len(PLAIN) + more[0].numel() if more else PLAIN.index(message.form)
    numbers = [len(message.tensors), kind, at[1]]
    for tensor, wanted in zip(message.tensors, message.wanted, strict=True):
        numbers += [DTYPES.index(tensor.dtype), int(wanted), tensor.dim(), *tensor.shape]
    return [torch.tensor(numbers + [0] * (HEADER - len(numbers))), *more]


def _empty(numbers: Sequence[int], device: torch.device) -> tuple[Message, int]:
    """A message as its head describes it, to be filled, and the number of its micro-batch."""
    count, kind, microbatch, at = *numbers[:3], 3
    tensors, wanted = [], []
    for _ in range(count):
        dtype, wants, dims = numbers[at : at + 3]
        shape = numbers[at + 3 : at + 3 + dims]
        tensors.append(torch.empty(shape, dtype=DTYPES[dtype], device=device))
        wanted.append(bool(wants))
        at += 3 + dims
    return Message(tensors, wanted, PLAIN[kind] if kind < len(PLAIN) else ""), microbatch


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: not every backend sends every dtype."""
    return tensor.view(-1).view(torch.uint8)
