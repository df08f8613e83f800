"""CPU seconds and memory of an analysis over the number of ranks, as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def draw(ranks: Sequence[int], panels: Mapping[str, Sequence[float]], foot: str, file: Path) -> None:
    """What each panel has (by its title, a value for each number of ranks, ascending) over the number of ranks, both
    axes logarithmic, beside a line through the last value that is proportional to the ranks."""
    if len(ranks) < 2:
        return
    width, height, left, top = 380, 260, 60, 40
    low, high = ranks[0], ranks[-1]
    text = []
    for panel, (title, every) in enumerate(panels.items()):
        values = [max(float(value), 1e-2) for value in every]
        bottom, ceiling = 10 ** np.floor(np.log10(min(values))), 10 ** np.ceil(np.log10(max(values)))
        shift = panel * (width + 140) + left

        def at(
            count: float, amount: float, shift: int = shift, lowest: float = bottom, highest: float = ceiling
        ) -> str:
            x = shift + width * np.log(count / low) / np.log(high / low)
            y = top + height * (1 - np.log(amount / lowest) / np.log(highest / lowest))
            return f"{x:.1f},{y:.1f}"

        def x_y(place: str) -> str:
            return 'x="{}" y="{}"'.format(*place.split(","))

        text.append(f'<text x="{shift}" y="{top - 16}" font-weight="bold">{title}</text>')
        for power in range(round(np.log10(bottom)), round(np.log10(ceiling)) + 1):
            line = f"{at(low, 10.0**power)} {at(high, 10.0**power)}"
            text.append(f'<polyline points="{line}" stroke="#ddd"/>')
            text.append(f'<text {x_y(at(low, 10.0**power))} dx="-8" dy="4" text-anchor="end">{10.0**power:g}</text>')
        for count in ranks:
            text.append(f'<text {x_y(at(count, bottom))} dy="18" text-anchor="middle">{count}</text>')
        straight = [values[-1] * count / high for count in ranks]
        points = [at(count, amount) for count, amount in zip(ranks, straight, strict=True) if amount >= bottom]
        text.append(f'<polyline points="{" ".join(points)}" stroke="#999" stroke-dasharray="4 4"/>')
        points = [at(count, amount) for count, amount in zip(ranks, values, strict=True)]
        text.append(f'<polyline points="{" ".join(points)}" stroke="#2a6f97" stroke-width="2"/>')
        text += ['<circle cx="{}" cy="{}" r="3.5" fill="#2a6f97"/>'.format(*point.split(",")) for point in points]
        text += [
            f'<text {x_y(point)} dx="6" dy="16">{f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"}</text>'
            for point, amount in zip(points, values, strict=True)
        ]
    foot = f"{foot}; dashed: proportional to the ranks"
    whole, tall = 2 * (width + 140), height + top + 60
    text.append(f'<text x="{whole / 2}" y="{tall - 12}" text-anchor="middle">{foot}</text>')
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{tall}" fill="none" font-size="12" '
        'font-family="sans-serif">\n<style>text {fill: #333}</style>\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(text)
        + "\n</svg>\n"
    )
