"""Numbers for spreadsheets and plotting programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any


def as_csv(rows: Iterable[Mapping[str, Any]], first: Iterable[str] = ()) -> str:
    """One line per row, with the keys of all of them, `first` before others; what a row lacks, and
    None, is empty."""
    found = [*rows]
    text = io.StringIO()
    names = dict.fromkeys([*first, *(name for row in found for name in row)])
    writer = csv.DictWriter(text, [*names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()
