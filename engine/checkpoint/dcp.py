"""Flat pieces of tensors, written and read through torch.distributed.checkpoint.

A tensor is written as what its elements are in a row, [numel], in chunks that say where they begin. Who reads it asks
for any stretch of it; finding the chunks that have it is the library's work.

What the library writes has two places for pickles, the description of the checkpoint and values that are no tensors.
Here the first is read by an unpickler that knows the classes of a description and nothing else, and the others are
`values`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save as save_planned

from ..comm.consensus import World, reason
from .folder import CheckpointError

CHUNK: Final = 1 << 24
"""Elements that are written, and so have to be read, at once: they are copied on the way."""

_SMALL: Final = 1 << 16
"""Elements below which a tensor that every rank has is not divided among them for writing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of a flattened tensor: `flat` [n] are the elements from `start` on, of `numel` in all."""

    name: str
    flat: Tensor
    numel: int
    start: int = 0
    everywhere: bool = False
    """Every rank has all of it."""
    fetch: Callable[[], Tensor] | None = None
    """Brings the elements, where they are not in memory and `flat` has nothing but their number and dtype."""

    def part(self, start: int, stop: int) -> Piece:
        """Elements `start` to `stop` of this piece."""
        whole = self.fetch
        fetch = None if whole is None else lambda: whole()[start:stop]
        return replace(self, flat=self.flat[start:stop], start=self.start + start, everywhere=False, fetch=fetch)

    def elements(self) -> Tensor:
        """What there is to be written."""
        return self.flat if self.fetch is None else self.fetch()


def shares(pieces: Iterable[Piece], rank: int, ranks: int) -> Iterator[Piece]:
    """What `rank` writes of its `pieces`, every rank's being in the same order: all of what it alone has, and its
    share of what all have, in chunks.
    """
    for number, piece in enumerate(pieces):
        if not piece.everywhere:
            yield from _chunks(piece)
            continue
        divided = max(1, min(ranks, piece.numel // _SMALL))
        turn = (rank - number) % ranks
        if turn < divided:
            width = -(-piece.numel // divided)
            yield from _chunks(piece.part(turn * width, min((turn + 1) * width, piece.numel)))


def _chunks(piece: Piece) -> Iterator[Piece]:
    for start in range(0, piece.flat.numel(), CHUNK):
        yield piece.part(start, min(start + CHUNK, piece.flat.numel()))


# --- writing


def write(path: Path, pieces: Iterable[Piece], values: Mapping[str, bytes], world: World, doing: str) -> None:
    """Write a checkpoint to the folder `path`: of every rank its `pieces` and `values`, whose names no other rank has.

    Raises CheckpointError, beginning with `doing`, on all ranks if one cannot.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of saving alone
            save_planned(
                {}, storage_writer=_Writer(path), planner=_SavePlanner(pieces, values), no_dist=world.size == 1
            )
    except CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        where = f"rank {rank}: " if world.size > 1 else ""
        raise CheckpointError(f"{doing}: {where}{reason(error)}") from error
    world.from_first(doing, lambda: Contents(path).check_files())


class _Writer(FileSystemWriter):
    def storage_meta(self) -> described.StorageMeta:
        """Without the path, which is temporary."""
        return described.StorageMeta(save_id=self.save_id)


class _SavePlanner(DefaultSavePlanner):
    """Plans to write what it is given; the state dict that the library passes is empty."""

    def __init__(self, pieces: Iterable[Piece], values: Mapping[str, bytes]) -> None:
        super().__init__()
        self._pieces = {described.MetadataIndex(piece.name, [piece.start]): piece for piece in pieces}
        self._values = values

    def create_local_plan(self) -> plans.SavePlan:
        items = [
            plans.WriteItem(
                index,
                plans.WriteItemType.SHARD,
                tensor_data=plans.TensorWriteData(
                    described.ChunkStorageMetadata(torch.Size([piece.start]), piece.flat.shape),
                    described.TensorProperties(piece.flat.dtype),
                    torch.Size([piece.numel]),
                ),
            )
            for index, piece in self._pieces.items()
        ]
        items += [plans.WriteItem(described.MetadataIndex(name), plans.WriteItemType.BYTE_IO) for name in self._values]
        return plans.SavePlan(items)

    def create_global_plan(self, all_plans: list[plans.SavePlan]) -> tuple[list[plans.SavePlan], described.Metadata]:
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == plans.WriteItemType.BYTE_IO:
            return _Value(self._values[write_item.index.fqn])
        return self._pieces[write_item.index].elements()


class _Value(io.BytesIO):
    def getbuffer(self) -> memoryview:
        """Of a copy: a view of a BytesIO crashes CPython 3.12 if both are garbage, and after a failed write the
        traceback makes them that.
        """
        return memoryview(self.getvalue())


# --- reading


class Contents:
    """A checkpoint to read from. Every rank opens it for itself. Raises CheckpointError if it is not one, or not
    whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _Reader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is not a checkpoint of dsprof: it has no .metadata. One that DeepSpeed wrote cannot be read"
            ) from error
        self._reader.set_up_storage_reader(self._metadata, True)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor or a value `name`."""
        return name in self._metadata.state_dict_metadata

    def check_files(self) -> None:
        """Raise CheckpointError if a file that ranks say they have written is not to be seen."""
        for name in sorted({info.relative_path for info in self._metadata.storage_data.values()}):
            if not (self._path / name).exists():
                raise CheckpointError(
                    f"{name}, written by another rank, is not to be seen: the folder must be one that all ranks share, "
                    "under the same path"
                )

    def dtype(self, name: str) -> torch.dtype | None:
        """Of the tensor `name`; None if the checkpoint has none with an element."""
        found = self._metadata.state_dict_metadata.get(name)
        return found.properties.dtype if isinstance(found, described.TensorStorageMetadata) else None

    def value(self, name: str) -> bytes:
        """The bytes written under `name`."""
        if not isinstance(self._metadata.state_dict_metadata.get(name), described.BytesStorageMetadata):
            raise CheckpointError(f"{self._path}: there is no {name!r} in it, so it is damaged")
        index = described.MetadataIndex(name)
        nowhere = torch.Size([0])
        planner = _LoadPlanner({})
        self._read([plans.ReadItem(plans.LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)], planner)
        return planner.values[name]

    def plan(self, pieces: Sequence[Piece]) -> list[plans.ReadItem]:
        """How `pieces` are read, in the order in which they lie in the files. Raises CheckpointError if parts are
        missing.
        """
        items: list[plans.ReadItem] = []
        for piece in pieces:
            length = piece.flat.numel()
            if length == 0:
                continue
            found = self._metadata.state_dict_metadata.get(piece.name)
            if not isinstance(found, described.TensorStorageMetadata) or found.size != (piece.numel,):
                have = (
                    f"has {found.size.numel()}"
                    if isinstance(found, described.TensorStorageMetadata)
                    else "is not in it"
                )
                raise CheckpointError(f"{self._path}: {piece.name} should have {piece.numel} elements and {have}")
            wanted = described.ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([length]))
            reads = create_read_items_for_chunk_list(piece.name, found, [wanted])
            if sum(item.lengths.numel() for item in reads) != length:
                raise CheckpointError(f"{self._path}: parts of {piece.name} are missing, so it is damaged")
            items += reads
        return sorted(items, key=self._place)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill `pieces`, in their own precision."""
        self._read(self.plan(pieces), _LoadPlanner({piece.name: piece.flat for piece in pieces}))

    def _place(self, item: plans.ReadItem) -> tuple[str, int]:
        info = self._metadata.storage_data.get(item.storage_index)
        if info is None:
            raise CheckpointError(f"{self._path}: a part of {item.storage_index.fqn} is in no file, so it is damaged")
        return info.relative_path, info.offset

    def _read(self, items: list[plans.ReadItem], planner: _LoadPlanner) -> None:
        try:
            self._reader.read_data(plans.LoadPlan(items), planner).wait()
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self._path}: what should be a tensor is something else: the file is damaged, or was made to run "
                "code. Nothing of it was run"
            ) from error
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self._path}: cannot be read, so it is damaged ({reason(error)})") from error


class _LoadPlanner(DefaultLoadPlanner):
    """Says where what is read goes. The plan is made by `Contents.plan`."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.values: dict[str, bytes] = {}

    def load_bytes(self, read_item: plans.ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: plans.ReadItem) -> Tensor:
        start = read_item.dest_offsets[0]
        return self._targets[read_item.dest_index.fqn][start : start + read_item.lengths[0]]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        """The description, of which nothing is believed that could run code or lead out of the folder."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(found, described.Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path} does not describe a checkpoint, so it is damaged")
        for info in found.storage_data.values():
            if not isinstance(info, _StorageInfo) or Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{path} names a file outside of its folder: it is not to be trusted")
        return found


_DESCRIPTION: Final = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        described.Metadata, described.MetadataIndex, described.TensorStorageMetadata, described.BytesStorageMetadata,
        described.ChunkStorageMetadata, described.TensorProperties, described.StorageMeta,
        described._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size,
    )
}  # fmt: skip
"""All classes that a checkpoint's description is made of."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = _DESCRIPTION.get((module, name))
        if kind is not None:
            return kind
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # what Python 3.11 writes for the member of an enumeration
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no description of a checkpoint has: the file is damaged, or was made "
            "to run code. Nothing of it was run"
        )


def _memory_format(kind: object, name: str) -> described._MEM_FORMAT_ENCODING:
    if kind is not described._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            f"it asks for getattr(..., {name!r}): it was made to run code. Nothing of it was run"
        )
    return described._MEM_FORMAT_ENCODING[name]
