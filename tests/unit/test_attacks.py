"""Hostile programs, one line each: wrong solutions that want to pass, programs that do damage.

The tables of what still succeeds, and why, are part of docs/sandbox.md.
"""

import os
import site
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fly
from fly.harness.sandbox import Program
from tests.attacks import damage, fakes, protocol
from tests.attacks.levels import LEVELS, launch_of, run_all
from tests.once import once

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the levels are Linux's"
)

FAKES = {
    **{name: Program(text, fakes.TEST) for name, text in {**fakes.F, **fakes.F2}.items()},
    **{
        f"protocol: {name}": Program(fakes.WRONG + text, fakes.TEST)
        for name, text in protocol.PROTOCOL.items()
    },
}


def levels(*daily: str) -> list:
    return [pytest.param(x, marks=() if x in daily else pytest.mark.slow) for x in LEVELS]


@pytest.fixture(scope="module", params=levels("namespaces"))
def fake_outcomes(request, tmp_path_factory):
    """(level, every wrong solution's outcome)."""
    launch = launch_of(request.param)
    made = once(tmp_path_factory, f"fakes-{request.param}", lambda: run_all(FAKES, launch))
    return request.param, made


@pytest.mark.parametrize("name", FAKES)
def test_wrong_solutions_do_not_pass(fake_outcomes, name):
    level, outcomes = fake_outcomes
    outcome = outcomes[name]
    if level == "process" and "human_eval" in name:
        pytest.xfail("all that the user may read can be read there")
    assert outcome.passed == (name == "control_right"), (level, outcome)


SECRET = "hunter2-" + "s" * 4313  # 4,321 characters: their number in a message is a finding


class Surroundings:
    """What a program could damage or reach, and whether it has."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("canary", "canary777", "sb", "home2", "home/.ssh", "home/.cache/huggingface"):
            (root / name).mkdir(parents=True)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)
        (root / "canary777").chmod(0o777)
        for name in ("canary/file", "canary777/file", "home/.ssh/id_rsa", "home/.npmrc",
                     "home/.cache/huggingface/token", "home/.bashrc"):  # fmt: skip
            (root / name).write_text(SECRET)
        (root / "canary777/file").chmod(0o666)
        os.mkfifo(root / "canary777/fifo")
        (root / "canary777/fifo").chmod(0o666)
        self.servers = [
            self._listen(socket.AF_INET, ("127.0.0.1", 0)),
            self._listen(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM),
            self._listen(socket.AF_UNIX, str(root / "sock600")),
            self._listen(socket.AF_UNIX, str(root / "sock777")),
            self._listen(socket.AF_UNIX, f"\0{root.name}"),
        ]
        (root / "sock600").chmod(0o600)
        (root / "sock777").chmod(0o777)
        self.witness = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.before = self._look()
        self.affinity = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)

    @staticmethod
    def _listen(family, address, kind=socket.SOCK_STREAM) -> socket.socket:
        server = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        return server

    def fill_in(self, text: str) -> str:
        tcp, udp = (server.getsockname()[1] for server in self.servers[:2])
        package = Path(fly.__file__).parent
        for name, value in {
            "{ROOT}": str(self.root), "{FLY}": str(package), "FLYPIDI": str(os.getpid()),
            "FLYPID": repr(str(os.getpid())), "CANARYPID": str(self.witness.pid),
            "SITE+": f"{site.getsitepackages()[0]!r}+",
            "BOOT,": f"{str(package / 'harness/sandbox/bootstrap.py')!r},",
            "UPORT": str(udp), "PORT": str(tcp), "PY,": f"{sys.executable!r},",
            "flyattack'": f"{self.root.name}'",
        }.items():  # fmt: skip
            text = text.replace(name, value)
        return text

    def _look(self) -> dict[str, tuple]:
        found = {}
        for path in sorted(self.root.rglob("*")):
            facts = path.lstat()
            content = path.read_text() if stat.S_ISREG(facts.st_mode) else ""
            names = os.listxattr(path, follow_symlinks=False)
            found[str(path)] = (
                facts.st_mode,
                facts.st_uid,
                facts.st_nlink,
                facts.st_mtime_ns,
                content,
                names,
            )
        return found

    def findings(self, outcome) -> list[str]:
        """What the program did outside of its folder."""
        found = []
        if self._look() != self.before:
            found.append("files outside were changed")
        for server, name in zip(self.servers, ("TCP", "UDP", "unix 0600", "unix 0777", "abstract")):
            try:
                server.recv(1) if server.type == socket.SOCK_DGRAM else server.accept()
                found.append(f"{name} was reached")
            except BlockingIOError:
                pass
        if (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)) != self.affinity:
            found.append("fly's scheduling was changed")
        if self.witness.poll() is not None:
            found.append("another process was killed")
        if "4321" in outcome.detail or "hunter2" in outcome.detail:
            found.append("a secret was read")
        return found

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.witness.kill()
        self.witness.wait()


DAMAGE = {name: text for name, (text, _) in {**damage.D, **damage.FOUND_IN_REVIEW}.items()}
# What no means is left to hold back at the last level; the same list stands in docs/sandbox.md.
AT_PROCESS_LEVEL = {
    "read secrets: shadow, HOME, ssh key, HF token": "no Landlock: files can be read",
    "write into world-writable places (canary 0777)": "no Landlock: files can be written",
    "write outside: open/append/rename/unlink/chmod/mkdir/symlink": "a user's own files, likewise",
    "poison fly itself: site-packages, .pth, fly source, bootstrap": "a user's own, likewise",
    "disk: fill /tmp, /var/tmp, /dev/shm, HOME, cwd of fly": "no Landlock: files can be written",
    "kill parent, kill -1, killpg 0 of fly": "no Landlock: a user's own processes, fly among them",
    "SIGSTOP the supervisor": "likewise",
    "ptrace parent/init, process_vm_readv, /proc/ppid/mem": "likewise",
    "user namespace: mount, remount rw, write": "a user's own files, likewise",
    "truncate by path": "a user's own files, likewise",
    "flags of inodes by ioctl": "a user's own files, likewise",
    "affinity and scheduling of fly": "a user's own processes, likewise",
    "copies that stop everyone": "a user's own processes, likewise",
    "files by their numbers (open_by_handle_at), from the root's inode": "as root",
    "TCP/UDP loopback": "no system call filter: sockets are open",
    "unix socket on disk, owned by root 0600": "likewise, to the user's own sockets",
    "unix socket on disk, 0777 (like dbus, docker, X11)": "likewise",
    "abstract unix socket": "likewise",
}


@pytest.fixture(scope="module", params=levels("namespaces"))
def damage_done(request, tmp_path_factory):
    """(level, {name: outcome}, {name: findings}, processes that are left)."""
    launch_of(request.param)
    name = f"damage-{request.param}"
    return request.param, *once(tmp_path_factory, name, lambda: do_damage(request.param))


def do_damage(level: str) -> tuple[dict, dict, list[str]]:
    # An ordinary user's programs would kill the tests, too, where nothing holds them back.
    spared = level == "process" and os.geteuid() != 0
    texts = {
        name: text
        for name, text in DAMAGE.items()
        if not (spared and ("FLYPIDI" in text or "kill(-1" in text))
    }
    with tempfile.TemporaryDirectory(prefix="flyattack") as folder:
        os.chmod(folder, 0o755)
        place = Path(folder)
        around = {n: Surroundings(place / f"{place.name}-{i}") for i, n in enumerate(texts)}
        try:
            programs = {
                name: Program(around[name].fill_in(text), "assert add(2, 3) == 5")
                for name, text in texts.items()
            }
            outcomes = run_all(programs, LEVELS[level])
            findings = {name: around[name].findings(outcomes[name]) for name in texts}
            return outcomes, findings, [pid for pid in os.listdir("/proc") if is_left(pid)]
        finally:
            for surroundings in around.values():
                surroundings.close()


@pytest.mark.parametrize("name", DAMAGE)
def test_no_program_does_damage(damage_done, name):
    level, outcomes, findings, _ = damage_done
    if name not in outcomes:
        pytest.xfail(AT_PROCESS_LEVEL[name])
    assert outcomes[name].reason != "sandbox"
    assert outcomes[name].seconds < 60  # however busy the machine
    if level == "process" and name in AT_PROCESS_LEVEL and findings[name]:
        pytest.xfail(AT_PROCESS_LEVEL[name])
    assert not findings[name], (level, outcomes[name])


def test_nothing_is_left_of_any_of_them(damage_done):
    """No process (the fork bombs outran a supervisor on a busy machine); the next program runs."""
    level, _, _, left = damage_done
    assert not left
    assert run_all({"good": Program("x = 1", "assert x == 1")}, LEVELS[level])["good"].passed


def is_left(pid: str) -> bool:
    """Whether a process has a mark of the programs above, or a user id that this process gave."""
    try:
        line = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
        uid = Path("/proc", pid).stat().st_uid
    except OSError:
        return False
    given = 1_500_000_000 + os.getpid() % 1_000_000 * 1000
    return given <= uid < given + 1000 or b"flyattackd" in line or b"sleep 61" in line
