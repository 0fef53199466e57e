"""The code imports what pyproject.toml installs, not what another package happens to bring."""

import ast
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules whose distribution has another name, or that a declared one is built on by contract.
DISTRIBUTIONS = {"PIL": "pillow", "pydantic_core": "pydantic", "tokenizers": "transformers"}


def imported(folder: str) -> dict[str, str]:
    """Third-party top-level modules under ``folder``: name -> a file that imports it."""
    own = {path.stem for path in ROOT.joinpath(folder).rglob("*.py")}
    own |= {"offbeat", "tests", "examples", "benchmarks"}
    found: dict[str, str] = {}
    for path in ROOT.joinpath(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in (name.split(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in own:
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def undeclared(folder: str, *extras: str) -> dict[str, str]:
    requirements: Iterable[str] = PROJECT["dependencies"]
    for extra in extras:
        requirements = [*requirements, *PROJECT["optional-dependencies"][extra]]
    declared = {Requirement(line).name.lower() for line in requirements}
    return {
        name: path
        for name, path in imported(folder).items()
        if DISTRIBUTIONS.get(name, name).lower() not in declared
    }


def test_the_package_imports_only_what_it_installs():
    assert undeclared("src") == {}


def test_the_tests_import_only_what_the_dev_extra_installs():
    assert undeclared("tests", "dev") == {}


def test_the_examples_import_only_what_the_demo_extra_installs():
    assert undeclared("examples", "demo") == {}
