"""How pandas holds strings while dsprof works: as Python's own, and not in Arrow's arrays.

The names of a table's columns are such an array, too, and every selection of columns reads them. Of tables as small as
those of an analysis, Arrow's take longer for that than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd


@contextmanager
def plain_strings() -> Iterator[None]:
    """Within, strings that pandas makes lie in numpy's arrays of Python objects. The results are the same."""
    with pd.option_context("mode.string_storage", "python"):
        yield
