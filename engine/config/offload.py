"""`zero_optimization.offload_optimizer`, `.offload_param` and `aio`: states and parameters in host memory or files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .model import Number, Section, Whole

Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: "none" if value is None else value)]


class OffloadParamConfig(Section):
    """Parameters that are not in use lie in host memory or in files (stage 3)."""

    device: Device = "none"
    """`cpu`: host memory; `nvme`: files below `nvme_path`; `none`: they stay on the device."""

    nvme_path: Path | None = None
    """Folder for the files, on each machine's own disk. Needed with `nvme`."""

    buffer_count: Whole = Field(default=5, ge=1)
    """Buffers that reads from and writes to files pass through (nvme)."""

    buffer_size: Whole = Field(default=100_000_000, ge=1)
    """Elements in each of these buffers (nvme). A larger piece passes through in parts."""

    max_in_cpu: Whole = Field(default=1_000_000_000, ge=0)
    """Elements kept in host memory although they belong on disk, so that they need no reading (nvme)."""

    pin_memory: bool = True
    """Host memory is page-locked where there is a GPU, which copies need to be fast and to overlap."""


class OffloadOptimizerConfig(Section):
    """The optimizer's states lie in host memory or in files, and the step is computed on the CPU (stages 1 to 3)."""

    device: Device = "none"
    """`cpu`: host memory; `nvme`: files below `nvme_path`; `none`: they stay on the device."""

    nvme_path: Path | None = None
    """Folder for the files, on each machine's own disk. Needed with `nvme`."""

    buffer_count: Whole = Field(default=4, ge=1)
    """Tiles of states held in host memory at once (nvme). Reading ahead and writing behind take one each."""

    pin_memory: bool = True
    """Host memory is page-locked where there is a GPU, which copies need to be fast and to overlap."""

    pipeline_read: bool = False
    """Read the next tile's states while the current one is updated (nvme)."""

    pipeline_write: bool = False
    """Write the last tile's states while the next one is updated (nvme)."""

    fast_init: bool = False
    """Begin without writing zeros: a tile's files come into being when it is first updated (nvme)."""

    ratio: Number = Field(default=1.0, ge=0, le=1)
    """Share of the elements whose states are offloaded; the rest is updated on the device (cpu)."""


class AioConfig(Section):
    """How files of offloaded states are read and written."""

    block_size: Whole = Field(default=1_048_576, ge=512, multiple_of=512)
    """Bytes in one request."""

    queue_depth: Whole = Field(default=8, ge=1)
    """Requests under way at once for one file."""

    intra_op_parallelism: Whole = Field(default=1, ge=1)
    """Threads that share the requests."""
