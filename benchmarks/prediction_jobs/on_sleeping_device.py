"""A job of tests/sleeping_device/jobs on a device that sleeps: `on_sleeping_device.py faults.py ARGUMENTS`.

SLEEPING_DEVICE names the folder of the device's libraries. The ranks meet, and write, in a folder of their own, which
is gone when the last of them is done.
"""

import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"


def main():
    name, *words = sys.argv[1:]
    job = TESTS / "sleeping_device" / "jobs" / name
    # All ranks have one parent, the agent that started them.
    place = Path(tempfile.gettempdir()) / f"sleeping-device-{os.getppid()}-{os.environ['MASTER_PORT']}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    os.environ["SLEEPING_DEVICE_MEETS"] = str(place)
    sys.path[:0] = [str(job.parent), str(TESTS)]
    import sleeping_device  # noqa: F401  # before torch

    sys.argv = [str(job), *words]
    runpy.run_path(str(job), run_name="__main__")
    told = [place / f"told.{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    if all(path.exists() for path in told):
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
