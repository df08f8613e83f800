"""`tensorboard` and `csv_monitor`: curves of a training, under DeepSpeed's names, against samples seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from ..config.debugging import CsvMonitorConfig, TensorBoardConfig
from ..hooks import Span

GAUGES: Final = ("train_loss", "lr", "loss_scale")
"""Of the engine's gauges, those that are curves."""


class Writer(Protocol):
    """Has files open, for curves."""

    def write(self, name: str, value: float, samples: int) -> None:
        """A point of the curve `Train/Samples/{name}`."""

    def close(self) -> None:
        """Write what is outstanding."""


class Curves:
    """Passes the engine's gauges to all writers, and what else `write` gets.

    `samples`: how many were seen, over all ranks, with those of the step under way.
    """

    def __init__(self, writers: Sequence[Writer], samples: Callable[[], int]) -> None:
        self._writers = writers
        self._samples = samples

    def begin(self, span: Span) -> None:
        """A gauge only ends."""

    def end(self, span: Span) -> None:
        if span.kind == "gauge" and span.name in GAUGES and span.value is not None:
            self.write(span.name, span.value)

    def write(self, name: str, value: float) -> None:
        samples = self._samples()
        for writer in self._writers:
            writer.write(name, value, samples)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class TensorBoardWriter:
    """Scalars in event files. Raises ImportError where the package tensorboard is not installed."""

    def __init__(self, section: TensorBoardConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the configuration enables tensorboard, which is not installed: `pip install tensorboard`, or write "
                '"csv_monitor" instead'
            ) from error
        self._writer: Any = SummaryWriter(str(Path(section.output_path) / section.job_name))

    def write(self, name: str, value: float, samples: int) -> None:
        self._writer.add_scalar(f"Train/Samples/{name}", value, samples)

    def close(self) -> None:
        self._writer.close()


class CsvWriter:
    """A file for each curve, `Train_Samples_lr.csv` and so on, that a run which is continued goes on with."""

    def __init__(self, section: CsvMonitorConfig) -> None:
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {}

    def write(self, name: str, value: float, samples: int) -> None:
        file = self._files.get(name) or self._open(name)
        file.write(f"{samples},{value}\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, name: str) -> IO[str]:
        path = self._folder / f"Train_Samples_{name}.csv"
        file = self._files[name] = path.open("a", buffering=1)  # by lines: a killed run has all but its last
        if file.tell() == 0:
            file.write(f"step,{name}\n")
        return file
