"""Linux's means of isolation, called through ctypes: namespaces, mounts, Landlock, capabilities.

Standard library only: loaded by bootstrap.py, where fly cannot be imported.
"""

import ctypes
import os
import struct
import sys
from contextlib import suppress

# Same numbers on every architecture of the kernel's unified table (all that CPython supports).
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
WORKDIR = "/tmp/fly-program"  # in a root of its own

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 1 << 18, 2
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE, _AT_FDCWD = 1, 0x8000, -100

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _syscall(number: int, *args: object) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _libc.syscall(ctypes.c_long(number), *wide)


def prctl(option: int, *args: int) -> bool:
    wide = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    return _libc.prctl(ctypes.c_int(option), *wide) == 0


def harden_supervisor() -> list[str]:
    """Have the kernel kill this process and what it starts before fly when memory runs out, hide
    it from ptrace and /proc/<pid>/, and adopt orphaned descendants. Returns what took hold."""
    done: list[str] = []
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
        file.flush()
        done.append("killed before fly")
    prctl(_PR_SET_DUMPABLE, 0)  # after the above: it makes the files of /proc/self root's
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return done


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, 9)


def enter_namespaces() -> bool:
    """Enter PID (for children), network, IPC, UTS and mount namespaces: all of them or none.

    Root enters them directly, so that it can still change its user id. Other users, and a root
    without CAP_SYS_ADMIN, need a user namespace around them.
    """
    flags = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWNS
    if os.geteuid() == 0 and _libc.unshare(flags) == 0:
        return True
    uid, gid = os.geteuid(), os.getegid()
    prctl(_PR_SET_DUMPABLE, 1)  # /proc/self is root's otherwise, and the maps cannot be written
    try:
        if _libc.unshare(flags | CLONE_NEWUSER) != 0:
            return False
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True
    finally:
        prctl(_PR_SET_DUMPABLE, 0)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> bool:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags))
    return _libc.mount(*arguments, data.encode()) == 0


def own_root(base: str, paths: list[str], hidden: list[str], size: int) -> list[str]:
    """Give this mount namespace a root of its own that shows only `paths`, read-only, and the
    `hidden` folders in them empty.

    It is built on a tmpfs of `size` bytes over `base`; WORKDIR in it is writable. Returns the
    features that took hold. Needs Linux 5.12 (mount_setattr).
    """
    options = f"size={size},nr_inodes=4096,mode=0755"
    os.umask(0o022)
    is_private = _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    if not (is_private and _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, options)):
        return []
    done = ["size-limited folder"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    if not all(_show(base, path) for path in (*paths, *devices)):
        return done
    if not all(_hide(base + path) for path in hidden if os.path.isdir(base + path)):
        return done
    os.makedirs(f"{base}/proc")
    os.makedirs(f"{base}/tmp", exist_ok=True)  # an interpreter may lie below it
    os.chmod(f"{base}/tmp", 0o1777)
    os.mkdir(base + WORKDIR)
    os.chmod(base + WORKDIR, 0o777)
    os.symlink("/tmp", f"{base}/dev/shm")  # for multiprocessing's semaphores
    if _mount("proc", f"{base}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC):
        done.append("own /proc")
    writable = _mount(f"{base}/tmp", f"{base}/tmp", "", _MS_BIND | _MS_REC)
    os.chdir(base)
    # pivot_root(2): with "." twice, the old root lies on top of the new one and is taken off.
    pivoted = writable and _libc.pivot_root(b".", b".") == 0
    pivoted = pivoted and _libc.umount2(b".", _MNT_DETACH) == 0
    os.chdir("/")
    if pivoted and _set_read_only("/", recursive=False):
        done.append("own root")
    return done


def _show(base: str, path: str) -> bool:
    """Bind `path`, read-only, to its place below `base`; a symbolic link is created again."""
    target = base + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return True
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    return _mount(path, target, "", _MS_BIND | _MS_REC) and _set_read_only(target)


def _hide(folder: str) -> bool:
    return _mount("tmpfs", folder, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4096")


def _set_read_only(path: str, recursive: bool = True) -> bool:
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    return _syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, 32) == 0


def landlock(workdir: str, paths: list[str], hidden: list[str]) -> list[str]:
    """Refuse reads outside `paths` and `workdir` and in the `hidden` folders, writes outside
    `workdir`, TCP, and signals.

    Returns the features that took hold: files need Linux 5.13, TCP 6.7, signals and abstract unix
    sockets 6.12.
    """
    abi = _syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return []
    reads = 1 << 0 | 1 << 2 | 1 << 3  # EXECUTE, READ_FILE, READ_DIR
    writes = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # WRITE_FILE, REMOVE_*, MAKE_*
    writes |= (1 << 13) * (abi >= 2) | (1 << 14) * (abi >= 3)  # REFER, TRUNCATE
    writes |= (1 << 15) * (abi >= 5)  # IOCTL_DEV
    tcp, scopes = 0b11 * (abi >= 4), 0b11 * (abi >= 6)  # bind, connect; abstract sockets, signals
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("=QQQ", reads | writes, tcp, scopes)[:size]
    ruleset = _syscall(_LANDLOCK_CREATE, attributes, size, 0)
    if ruleset < 0:
        return []
    allowed = _reads(paths, hidden, reads)
    allowed |= {"/dev/urandom": 1 << 2, "/dev/zero": 1 << 2, "/dev/null": 1 << 1 | 1 << 2}
    allowed |= {"/sys/devices/system/cpu": 1 << 2 | 1 << 3, workdir: reads | writes}
    for path, rights in allowed.items():
        _allow(ruleset, path, rights)
    restricted = _syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    if not restricted:
        return []
    done = ["Landlock reads", "Landlock writes"]
    return done + ["Landlock TCP"] * bool(tcp) + ["Landlock signals"] * bool(scopes)


def _reads(paths: list[str], hidden: list[str], rights: int) -> dict[str, int]:
    """What may be read: a rule holds for all below it, so a folder that holds a hidden one may
    only be listed, and what lies beside that may be read."""
    found: dict[str, int] = {}
    for path in map(os.path.realpath, paths) if hidden else paths:
        within = [folder for folder in hidden if f"{folder}/".startswith(f"{path}/")]
        if not within:
            found[path] = rights
        elif path not in within:
            found[path] = 1 << 3  # READ_DIR
            beside = [os.path.join(path, name) for name in os.listdir(path)]
            found |= _reads(beside, within, rights)
    return found


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # what applies to files
    _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _capabilities(keep: int) -> bool:
    """Reduce the capability sets to the bit mask `keep`."""
    header = struct.pack("=Ii", 0x20080522, 0)
    low = struct.pack("=III", keep, keep, keep)  # effective, permitted, inheritable
    return _libc.capset(header, low + struct.pack("=III", 0, 0, 0)) == 0


def _permitted() -> int:
    sets = ctypes.create_string_buffer(24)
    _libc.capget(struct.pack("=Ii", 0x20080522, 0), sets)
    return struct.unpack("=IIIIII", sets.raw)[1]


def _needs_root_to_read() -> bool:
    """Whether other users cannot read the interpreter, because it lies below /root, say."""
    for start in {sys.executable, sys.prefix, sys.base_prefix, os.__file__}:
        path = os.path.realpath(start)
        while path != "/":
            needed = 0o005 if os.path.isdir(path) else 0o004
            if os.stat(path).st_mode & needed != needed:
                return True
            path = os.path.dirname(path)
    return False


def drop_privileges(uid: int, may_override: bool) -> bool:
    """Give up every capability, and root for the user id `uid` (else `nobody`).

    RLIMIT_NPROC does not bind root, and root may signal and inspect anyone. If only root can read
    the interpreter, the right to read everything is kept. CAP_DAC_OVERRIDE, which can write as
    well, replaces it only if `may_override`: something else refuses the writes.
    Returns whether root was given up.
    """
    if os.geteuid() != 0:
        _capabilities(0)  # a user namespace gives its creator all of them
        return False
    keep = 0
    if _needs_root_to_read():
        permitted = _permitted()
        choices = [CAP_DAC_READ_SEARCH, *([CAP_DAC_OVERRIDE] if may_override else [])]
        keep = next((1 << bit for bit in choices if permitted >> bit & 1), 0)
        if not keep:
            return False
    prctl(_PR_SET_KEEPCAPS, 1)
    for candidate in (uid, 65534):
        with suppress(OSError):
            os.chown(".", candidate, candidate)
            os.setgroups([])
            os.setresgid(candidate, candidate, candidate)
            os.setresuid(candidate, candidate, candidate)
            break
    _capabilities(keep)
    for bit in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):  # so that child programs can start
        if keep >> bit & 1:
            prctl(_PR_CAP_AMBIENT, 2, bit)
    return os.geteuid() != 0
