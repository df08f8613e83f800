"""Pictures of bright rectangles with their boxes, as YOLO reads them, into the directory given."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, COUNTS = 64, {"train": 160, "val": 16}


def main(out: Path) -> None:
    source = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for kind in ("images", "labels"):
            (out / kind / split).mkdir(parents=True)
        for number in range(count):
            picture = source.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
            left, top = source.integers(0, SIDE // 2, 2)
            width, height = source.integers(12, SIDE // 2, 2)
            picture[top : top + height, left : left + width] = 220
            Image.fromarray(picture).save(out / "images" / split / f"{number}.png")
            box = [(left + width / 2) / SIDE, (top + height / 2) / SIDE, width / SIDE, height / SIDE]
            (out / "labels" / split / f"{number}.txt").write_text("0 " + " ".join(f"{side:.4f}" for side in box))
    (out / "data.yaml").write_text(f"path: {out.resolve()}\ntrain: images/train\nval: images/val\nnames: [rectangle]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
