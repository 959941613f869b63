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
        is_one = len(names) == 1 or ", " not in defaults
        values = [defaults] * len(names) if is_one else defaults.split(", ")
        found += zip(names, values, strict=True)
    return found


def test_every_key_is_there_once_with_its_default():
    fields = config._known_keys()  # those that a rule brings along, too
    documented = rows()
    assert sorted(name for name, _ in documented) == sorted(fields)
    for name, default in documented:
        value = fields[name].get_default()
        if fields[name].is_required():
            assert default == "required"
        else:
            assert default == (value if isinstance(value, str) else json.dumps(value)), name
