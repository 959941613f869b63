"""One self-contained file: template, styles, scripts and data.

Model texts are untrusted. They are only in JSON blocks, where no `<` is left, and the page's
scripts never parse them as HTML. A content security policy lets nothing else run or load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from string import Template
from typing import Any

from fly.version import VERSION

_FOLDER = Path(__file__).parent
_FIRST = ("dom.js", "save.js", "charts.js", "figures.js")


def render(title: str, summary: dict[str, Any], *scripts: str, **blocks: Any) -> bytes:
    """The page. title: "fly COMMAND" or "fly COMMAND: more". summary, blocks: JSON values, each for
    the script element data-NAME; lists may be iterators. scripts: after those of all pages."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    blocks = {"summary": {"version": VERSION, "created": now, **summary}, **blocks}
    style = _read("report.css")
    script = "\n".join(_read(name) for name in (*_FIRST, *scripts))
    texts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "brand": html.escape(title.partition(":")[0]),
        "style": style,
        "script": script,
    }
    halves = _read("report.html").split("$data")
    before, after = (Template(half).substitute(texts) for half in halves)
    page = bytearray()  # as a text, it may take four times as much memory
    for part in itertools.chain([before], _data(blocks), [after]):
        page += part.encode(errors="replace")  # half a surrogate pair, which JSON can spell
    return bytes(page)


def _data(blocks: dict[str, Any]) -> Iterator[str]:
    """The script elements, an iterator's items one by one: the whole may be large."""
    for name, value in blocks.items():
        yield f'<script type="application/json" id="data-{name}">'
        if isinstance(value, Iterator):
            yield "["
            for number, item in enumerate(value):
                yield "," * (number > 0) + as_json(item)
            yield "]"
        else:
            yield as_json(value)
        yield "</script>\n"


def as_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, no NaN, one line."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """NaN and infinities are null: JSON has no other word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
