"""`tensorboard` and `csv_monitor`: the engine's gauges of a step, under DeepSpeed's names, against samples seen."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from ..hooks import Span

if TYPE_CHECKING:
    from ..config.debugging import CsvMonitorConfig, TensorBoardConfig

TAGS: Final = {name: f"Train/Samples/{name}" for name in ("train_loss", "lr", "loss_scale")}
"""Gauge -> the name it is written under."""


class Writer(Protocol):
    """A listener that has files open."""

    def begin(self, span: Span) -> None: ...
    def end(self, span: Span) -> None: ...
    def close(self) -> None:
        """Write what is outstanding."""


class TensorBoardWriter:
    """Scalars in event files. Raises ImportError where the package tensorboard is not installed."""

    def __init__(self, section: TensorBoardConfig, train_batch_size: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the configuration enables tensorboard, which is not installed: `pip install tensorboard`, or write "
                '"csv_monitor" instead'
            ) from error
        self._batch = train_batch_size
        self._writer: Any = SummaryWriter(str(Path(section.output_path) / section.job_name))

    def begin(self, span: Span) -> None:
        """A gauge only ends."""

    def end(self, span: Span) -> None:
        if span.kind == "gauge" and span.name in TAGS:
            self._writer.add_scalar(TAGS[span.name], span.value, (span.step + 1) * self._batch)

    def close(self) -> None:
        self._writer.close()


class CsvWriter:
    """A file for each gauge, `Train_Samples_lr.csv` and so on, that a run which is continued goes on with."""

    def __init__(self, section: CsvMonitorConfig, train_batch_size: int) -> None:
        self._batch = train_batch_size
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {}

    def begin(self, span: Span) -> None:
        """A gauge only ends."""

    def end(self, span: Span) -> None:
        if span.kind == "gauge" and span.name in TAGS:
            file = self._files.get(span.name) or self._open(span.name)
            file.write(f"{(span.step + 1) * self._batch},{span.value}\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, name: str) -> IO[str]:
        path = self._folder / f"{TAGS[name].replace('/', '_')}.csv"
        file = self._files[name] = path.open("a", buffering=1)  # by lines: a killed run has all but its last
        if file.tell() == 0:
            file.write(f"step,{name}\n")
        return file
