"""Check that the unit tests notice a changed line in pure code: `python tests/mutation_check.py [--seed 0] [--sample
40]`.

Draws single-line mutations (DeMillo, Lipton and Sayward 1978) of the modules under the purity contract in
pyproject.toml, applies them one at a time to a scratch copy of the tree, and runs the test folder that mirrors the
module, then all unit tests for survivors. The draw depends only on the seed and the code, not on a module's folder.
Exit code 1 if more than one in twenty survives.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = "What decides is pure"
MOST_SURVIVORS = 1 / 20
LONGEST_RUN_S = 1_800
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
"""The mutation of each operator."""


@dataclass(frozen=True, order=True)
class Mutation:
    """An expression on one line, and its replacement source. `module` is the file's name without folders."""

    module: str
    scope: str
    line: str
    column: int
    mutated: str
    line_number: int
    path: Path

    def apply(self, tree: Path) -> None:
        """Write the mutated line into the copy of the project at `tree`."""
        file = tree / self.path
        lines = file.read_text().splitlines(keepends=True)
        lines[self.line_number - 1] = self.mutated + "\n"
        file.write_text("".join(lines))

    def __str__(self) -> str:
        return f"{self.path}:{self.line_number}: {self.line.strip()}  ->  {self.mutated.strip()}"


def modules_that_decide() -> list[Path]:
    """Return the files of the purity contract, relative to the root."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(contract["source_modules"] for contract in contracts if contract["name"] == CONTRACT)
    paths: set[Path] = set()
    for name in names:
        module = ROOT / name.replace(".", "/")
        paths |= set(module.rglob("*.py")) if module.is_dir() else {module.with_suffix(".py")}
    return sorted(path.relative_to(ROOT) for path in paths if path.name != "__init__.py")


def mutations_of(path: Path) -> Iterator[Mutation]:
    """Yield every mutation of a file: a swapped operator, a dropped negation, a flipped truth value."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()

    def visit(node: ast.AST, scope: str) -> Iterator[Mutation]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}"
        for before, replacement in replacements(node):
            if before.lineno == before.end_lineno and scope:
                line = lines[before.lineno - 1].encode()
                new = line[: before.col_offset] + replacement.encode() + line[before.end_col_offset :]
                yield Mutation(path.stem, scope, line.decode(), before.col_offset, new.decode(), before.lineno, path)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.arg, ast.JoinedStr)) and child not in annotations(node):
                yield from visit(child, scope)

    yield from visit(ast.parse(source), "")


def annotations(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that are types, and its decorators: code that no test can execute wrongly."""
    names = ("annotation", "returns")
    return [*getattr(node, "decorator_list", ()), *(child for name in names if (child := getattr(node, name, None)))]


def replacements(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions at this node that a mutation replaces, each with its new source."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield node, written(ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, written(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield node, written(ast.BoolOp(SWAPS[type(node.op)](), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)


def written(expression: ast.expr) -> str:
    """Return the source of an expression, in parentheses, since its new context may bind tighter."""
    return f"({ast.unparse(expression)})"


def mirrored_tests(path: Path) -> Path:
    """Return the deepest test that mirrors a module: its file if the folder has one, otherwise the folder."""
    mirror = Path("tests/unit", *path.parts[1:] if path.parts[0] == "services" else path.parts)
    folder = next(parent for parent in mirror.parents if (ROOT / parent).exists())
    files = sorted((ROOT / folder).rglob(f"test_{mirror.name}"))
    return files[0].relative_to(ROOT) if files else folder


def copy_tree(target: Path) -> None:
    """Copy the tracked files to a repository of their own, since some tests ask git for the list."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copied, follow_symlinks=False)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=target, check=True)


def failure_of(tree: Path, tests: Path, *options: str) -> str | None:
    """Return the end of the report if a test fails or never ends in the copy, otherwise None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, str(tests)]
    own = {**os.environ, "PYTHONPATH": str(tree)}  # processes that tests start elsewhere import the copy too
    try:
        run = subprocess.run(
            command, cwd=tree, env=own, capture_output=True, text=True, check=False, timeout=LONGEST_RUN_S
        )
    except subprocess.TimeoutExpired:
        return f"{tests} ran longer than {LONGEST_RUN_S} s"
    return run.stdout[-2_000:] if run.returncode else None


def main() -> None:
    """Draw the mutations, run the tests on each, and print undetected mutations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=40)
    options = parser.parse_args()
    console = Console()
    candidates = sorted(mutation for path in modules_that_decide() for mutation in mutations_of(path))
    drawn = random.Random(options.seed).sample(candidates, min(options.sample, len(candidates)))
    survivors = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        copy_tree(Path(scratch))
        console.print("the unit tests without a mutation, then one line per mutation")
        if failure := failure_of(Path(scratch), Path("tests/unit"), "-n", "auto"):
            sys.exit(f"{failure}\na unit test fails in the copy without a mutation: mend it first")
        for number, mutation in enumerate(drawn, 1):
            started_s = time.monotonic()
            mutation.apply(Path(scratch))
            tests = mirrored_tests(mutation.path)
            if not (failure_of(Path(scratch), tests) or failure_of(Path(scratch), Path("tests/unit"), "-n", "auto")):
                survivors.append(mutation)
            result = f"{'not ' * (mutation in survivors)}noticed in {time.monotonic() - started_s:.0f} s"
            console.print(f"{number} of {len(drawn)} {result}: {mutation}", markup=False, soft_wrap=True)
            shutil.copy(ROOT / mutation.path, Path(scratch, mutation.path))
    console.print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed, drawn from {len(candidates)}")
    sys.exit(len(survivors) > MOST_SURVIVORS * len(drawn))


if __name__ == "__main__":
    main()
