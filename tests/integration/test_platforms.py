"""What has to start on systems without Unix's own modules."""

import subprocess
import sys

from tests.configured_runs import write_run

UNIX = ("resource", "fcntl", "termios", "pwd", "grp")
PROGRAM = """
import builtins
real = builtins.__import__
def without(name, globals=None, *rest, **more):
    if name in {unix!r} and (globals or {{}}).get("__name__", "").split(".")[0] == "fly":
        raise ModuleNotFoundError(f"No module named {{name!r}}")
    return real(name, globals, *rest, **more)
builtins.__import__ = without  # other libraries know where they are
from fly.cli import main as cli
for command in {commands!r}:
    try:
        cli.main(command)
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print("done:", command[0])
"""


def test_finished_runs_are_read_everywhere(tmp_path):
    """`import resource` in a module that all import: nothing of fly started on Windows."""
    paths = [
        str(write_run(tmp_path / name, {"t": [1, 0, 1, 1]}, **settings))
        for name, settings in (("a", {"use_sd": False}), ("b", {}))
    ]
    commands = [
        ["compare", *paths],
        ["report", *paths, "--output", str(tmp_path / "report.html")],
    ]
    program = PROGRAM.format(unix=UNIX, commands=commands)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for command in commands:
        assert f"done: {command[0]}" in done.stdout
