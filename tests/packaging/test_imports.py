"""What importing costs, and which way imports may go."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "schemas/moetrace_schemas"


def run(code: str) -> str:
    """Run in a fresh interpreter without anything imported yet."""
    paths = [str(ROOT / part) for part in (".", "collectors", "schemas", "dashboards")]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


HEAVY = "torch", "transformers", "numpy", "yaml", "clickhouse_connect", "opentelemetry", "requests"


def test_importing_the_library_imports_nothing_heavy() -> None:
    """The model process pays when it traces, not when it imports."""
    loaded = run(f"import moetrace; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded == "[]"


def test_a_tracer_without_a_model_needs_no_torch() -> None:
    """Steps and hand-written phases work in a process that has never heard of it."""
    code = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "transformers"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
import moetrace
from moetrace.testing import MemoryEmitter
emitter = MemoryEmitter()
moetrace.init(run_id="r", emitters=[emitter])
parts = moetrace.wrap(router=lambda: 1, layer=0)
with moetrace.step(), moetrace.phase("schedule"):
    parts.router()
moetrace.shutdown()
print(len(emitter.records), {row.phase.value for row in emitter.records[0].phases} >= {"schedule"})
"""
    assert run(code) == "1 True"


def test_adapters_of_frameworks_that_are_not_there_are_not_loaded() -> None:
    """A model's own adapter is asked, and no module of a framework is imported for it, theirs or ours."""
    pytest.importorskip("torch")
    code = """
import moetrace
from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.find_layers import ADAPTERS
tracer = moetrace.init(run_id="r", endpoint="")
assert tracer.instrument(ReferenceMoE(8, 16, num_experts=4, top_k=2))
moetrace.shutdown()
frameworks = {framework.partition(".")[0] for _, _, framework in ADAPTERS} - {""}
assert len(frameworks) == 9, frameworks
ours = {module for module, _, framework in ADAPTERS if framework}
print(sorted(name for name in (*frameworks, *ours) if name in sys.modules))
"""
    assert run(code) == "[]"


def test_the_contracts_import_the_standard_library_only() -> None:
    """They are read in the model process, in the service and by tools that have neither's dependencies."""
    foreign = set()
    for path in SCHEMAS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            foreign |= {
                name
                for name in names
                if name.partition(".")[0] not in {*sys.stdlib_module_names, "moetrace_schemas"}
            }
    assert foreign == set()


def test_import_contracts_are_kept() -> None:
    """Layers import downwards only, library and service never each other; the rules are in pyproject.toml."""
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout
