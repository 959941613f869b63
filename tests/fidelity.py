"""Whether the sandbox judges HumanEval's solutions, and variants of them, as one process does:

python -m tests.fidelity HumanEval.jsonl.gz --variants 9 --level namespaces
"""

import argparse
import ast
import copy
import gzip
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fly.harness.sandbox import Limits, Program
from fly.harness.sandbox.process import execute
from fly.launch import cores_of_this_process
from tests.attacks.levels import LEVELS, launch_of

_LIMITS = Limits(wall_seconds=5.0, cpu_seconds=5.0)
_OPERATORS = [ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod]
_COMPARISONS = [ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq]
_RESULTS = ("({},)", "[{}]", "str({})", "list({})", "tuple({})", "iter({})", "not {}", "None")


def vary(tree: ast.Module, rng: random.Random) -> ast.Module:
    """A copy with one operator, constant, condition or result changed at random."""
    tree = copy.deepcopy(tree)
    kinds = (ast.BinOp, ast.Compare, ast.Constant, ast.BoolOp, ast.If, ast.Return)
    node = rng.choice([node for node in ast.walk(tree) if isinstance(node, kinds)])
    if isinstance(node, ast.BinOp):
        node.op = rng.choice(_OPERATORS)()
    elif isinstance(node, ast.Compare):
        node.ops[0] = rng.choice(_COMPARISONS)()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return):
        text = rng.choice(_RESULTS).format(ast.unparse(node.value) if node.value else "None")
        node.value = ast.parse(text, mode="eval").body
    elif isinstance(node.value, (int, float)):
        node.value = node.value + rng.choice((-1, 1))
    elif isinstance(node.value, str):
        node.value = rng.choice((node.value[1:], node.value + "x", node.value.upper()))
    return ast.fix_missing_locations(tree)


def passes_in_one_process(program: Program) -> bool:
    """Both are executed in one namespace, as code_eval does."""
    text = f"{program.source}\n{program.tests}"
    command = [sys.executable, "-c", f"exec(compile({text!r}, '<program>', 'exec'), {{}})"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                command, cwd=folder, env={"PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=_LIMITS.wall_seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--variants", type=int, default=9, help="of each solution")
    parser.add_argument("--level", choices=LEVELS, default="namespaces")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, programs = random.Random(options.seed), []
    for doc in map(json.loads, gzip.decompress(options.data.read_bytes()).splitlines()):
        tree = ast.parse(doc["prompt"] + doc["canonical_solution"])
        tests = f"{doc['test']}\ncheck({doc['entry_point']})"
        trees = [tree] + [vary(tree, rng) for _ in range(options.variants)]
        programs += [(doc["task_id"], Program(ast.unparse(tree), tests)) for tree in trees]
    launch = launch_of(options.level)
    with ThreadPoolExecutor(cores_of_this_process()) as pool:
        expected = list(pool.map(lambda item: passes_in_one_process(item[1]), programs))
        outcomes = list(pool.map(lambda item: execute(item[1], _LIMITS, launch), programs))
    differ = 0
    for (name, program), expectation, outcome in zip(programs, expected, outcomes):
        if outcome.passed != expectation:
            differ += 1
            print(f"{name}: {outcome.reason} {outcome.detail}, in one process {expectation}")
            print(program.source)
    print(
        f"{options.level}: {len(programs)} programs, {sum(expected)} pass in one process, "
        f"{differ} are judged differently"
    )


if __name__ == "__main__":
    main()
