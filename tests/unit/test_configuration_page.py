"""docs/configuration.md against the keys that there are."""

import json
import re
from pathlib import Path

from fly import config

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")


def rows():
    """(key, documented default) of every key; several may share a row."""
    found = []
    for keys, defaults in re.findall(r"^\| (`[a-z].*?) \| (.*?) \|", PAGE, re.MULTILINE):
        names = re.findall(r"`(\w+)`", keys)
        values = defaults.split(", ") if ", " in defaults else [defaults] * len(names)
        found += zip(names, values, strict=True)
    return found


def test_every_key_is_there_once_with_its_default():
    fields = config.FlyConfig.model_fields
    documented = rows()
    assert sorted(name for name, _ in documented) == sorted(fields)
    for name, default in documented:
        value = fields[name].get_default()
        if fields[name].is_required():
            assert default == "required"
        else:
            assert default == (value if isinstance(value, str) else json.dumps(value)), name
