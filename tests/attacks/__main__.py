"""Every hostile program at every level of this machine, a line each:

python -m tests.attacks
"""

import pytest

from fly.harness.sandbox import Outcome
from tests.attacks.levels import LEVELS, launch_of, run_all
from tests.unit.test_attacks import FAKES, do_damage


def main() -> None:
    for level in LEVELS:
        try:
            launch = launch_of(level)
        except pytest.skip.Exception as skipped:
            print(f"{level:10}  not tried: {skipped.msg}")
            continue
        unearned = harmful = 0
        for name, outcome in run_all(FAKES, launch).items():
            is_unearned = outcome.passed and name != "control_right"
            unearned += is_unearned
            show(level, name, outcome, "PASSED UNEARNED" if is_unearned else "")
        outcomes, findings, left = do_damage(level)
        for name, outcome in outcomes.items():
            harmful += bool(findings[name])
            show(level, name, outcome, "; ".join(findings[name]).upper())
        print(f"{level:10}  {unearned} of {len(FAKES) - 2} passed unearned")
        print(f"{level:10}  {harmful} of {len(outcomes)} did damage or got out")
        print(f"{level:10}  {len(left)} processes left")


def show(level: str, name: str, outcome: Outcome, finding: str) -> None:
    print(f"{level:10}  {name[:60]:60}  {outcome.reason:9}  {outcome.detail[:60]:60}  {finding}")


if __name__ == "__main__":
    main()
