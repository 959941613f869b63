"""One self-contained file: template, styles, scripts and data.

Model texts are untrusted. They are only in JSON blocks, where no `<` is left, and the page's
scripts never parse them as HTML. A content security policy lets nothing else run or load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
SCRIPTS = (
    "dom.js",
    "save.js",
    "charts.js",
    "figures.js",
    "diff.js",
    "trace.js",
    "table.js",
    "report.js",
)


def render(title: str, blocks: dict[str, Any]) -> str:
    """The page. blocks: JSON values by the id of their script element."""
    style = _read("report.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    data = "\n".join(
        f'<script type="application/json" id="{name}">{as_json(value)}</script>'
        for name, value in blocks.items()
    )
    parts = {
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "title": html.escape(title),
        "style": style,
        "data": data,
        "script": script,
    }
    page = _read("report.html")
    before, *rest = page.split("{{")
    for piece in rest:  # one pass: what is put in is never looked through again
        name, after = piece.split("}}", 1)
        before += parts[name] + after
    return before


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<`, no NaN, one line."""
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
