"""No input becomes code: nothing unpickles, evaluates or starts a shell, and no SQL is joined from input."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "moetrace",
    "collectors/moetrace_collectors",
    "schemas/moetrace_schemas",
    "dashboards/moetrace_dashboards",
)
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "joblib.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
SQL = re.compile(
    r"\b(SELECT|INSERT INTO|ALTER TABLE|CREATE|DROP|DELETE FROM|TRUNCATE|OPTIMIZE|SHOW|DESCRIBE)\s"
    r"|\b(USE|SET|PRAGMA)\s"
)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
REVIEWED = {
    ("read_only_query.py", "database"): "one plain name: check_name_and_guard",
    ("read_only_query.py", "assignments"): "names from a closed list, values quoted by _quote",
    ("migrate.py", "database"): "a plain name: check_identifier",
    ("offline/nsys.py", "quoted"): "column names of this module that the table has",
    ("offline/nsys.py", "table"): "table names of this module",
    ("sinks/embedded_insert.py", "self._database"): "a plain name: check_identifier, by migrate before",
    ("sinks/embedded_insert.py", "table"): "written in clickhouse_columns",
    ("sinks/embedded_insert.py", "columns"): "names of columns, written in clickhouse_columns",
    ("sinks/embedded_insert.py", "self._settings"): "EMBEDDED_SETTINGS: names of its module, whole numbers",
    ("views/browse_queries.py", "order"): "a value of STEP_ORDERS of this module",
    ("views/browse_queries.py", "column"): "written in this module",
    ("views/browse_queries.py", "kind"): "written in this module",
    ("commands/suggestions.py", "program()"): "a line for a person to type; nothing runs it",
    ("commands/suggestions.py", "source"): "the same",
    ("commands/suggestions.py", "where"): "a run id that the wire's pattern takes",
    ("clickhouse/render.py", "database"): "a plain name: check_identifier, by render",
    ("clickhouse/render.py", "cluster"): "a plain name: check_identifier, by render",
    ("clickhouse/render.py", "name"): "a key of SHARDING_KEYS",
    ("clickhouse/render.py", "columns"): "of the three above",
    ("clickhouse/render.py", "arguments"): "of the same, and a value of SHARDING_KEYS",
    ("clickhouse/render.py", "table"): "a key of TIME_COLUMNS",
    ("clickhouse/render.py", "action"): "a value of TIME_COLUMNS and a whole number",
    ("queries/sql.py", "columns"): "of this module, at build time",
    ("queries/sql.py", "table"): "of this module, at build time",
    ("queries/sql.py", "where"): "of this module, at build time",
}
"""(end of the path, what is put into a text that looks like SQL): why it is no input."""

ASK_BY_THEMSELVES = (
    "access/client.py",
    "demo_processes.py",  # health of its own collector on loopback
    "doctor/checklist.py",  # Prometheus
)


def where(path: Path, node: ast.AST) -> str:
    """Place of a node."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every module."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def dangerous(node: ast.AST) -> bool:
    """Whether a node imports or calls what turns data into code."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in BANNED_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in BANNED_MODULES
    if isinstance(node, ast.Call):
        flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        return (
            ast.unparse(node.func) in BANNED_CALLS
            or flags.get("shell", "False") != "False"
            or flags.get("allow_pickle", "False") != "False"
        )
    return False


def joined_parts(node: ast.AST) -> list[ast.expr]:
    """What is put into a text that looks like SQL: by an f-string, +, % or format."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        if SQL.search(text):
            return [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        sides = (node.left, node.right)
        if any(isinstance(side, ast.Constant) and SQL.search(str(side.value)) for side in sides):
            return [side for side in sides if not isinstance(side, ast.Constant)]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("format", "format_map")
        and isinstance(node.func.value, ast.Constant)
        and SQL.search(str(node.func.value.value))
    ):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def fixed(part: ast.expr) -> bool:
    """Whether a part is written in the module: a constant, or a function of constants."""
    if isinstance(part, ast.Constant):
        return True
    if isinstance(part, ast.Name):
        return CONSTANT.fullmatch(part.id) is not None
    if isinstance(part, ast.JoinedStr):
        return all(fixed(value) for value in part.values)
    if isinstance(part, ast.FormattedValue):
        return fixed(part.value)
    if isinstance(part, ast.Call):
        named = isinstance(part.func, ast.Name) and part.func.id.startswith("_")
        return named and all(fixed(value) for value in (*part.args, *(word.value for word in part.keywords)))
    return False


def reviewed(path: Path, part: ast.expr) -> bool:
    """Whether somebody has looked at this one."""
    return any(str(path).endswith(end) and ast.unparse(part) == text for end, text in REVIEWED)


def test_nothing_turns_data_into_code() -> None:
    """No unpickling, no eval or exec, no shell, no YAML that makes objects, in any of the four packages."""
    assert len(MODULES) > 100
    assert [where(path, node) for path, node in nodes() if dangerous(node)] == []


def test_no_sql_is_joined_from_input() -> None:
    """Values travel as parameters; what is put into SQL is written in its module, or was reviewed by name."""
    joined = [
        f"{where(path, node)}: {ast.unparse(part)}"
        for path, node in nodes()
        for part in joined_parts(node)
        if not fixed(part) and not reviewed(path, part)
    ]
    assert joined == []


def test_what_was_reviewed_is_still_there() -> None:
    """An exception nobody needs any more would let the next one through."""
    seen = {
        (end, text)
        for path, node in nodes()
        for part in joined_parts(node)
        for end, text in REVIEWED
        if str(path).endswith(end) and ast.unparse(part) == text
    }
    assert seen == set(REVIEWED)


def test_collectors_are_asked_with_what_the_environment_says() -> None:
    """A command that opened an address by itself would show no token, and know no authority."""
    by_themselves = [
        where(path, node)
        for path, node in nodes()
        if path.is_relative_to(ROOT / "collectors")
        and isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("urlopen")
        and not str(path).endswith(ASK_BY_THEMSELVES)
    ]
    assert by_themselves == [], (
        "use moetrace_collectors.access.client: client_access().fetch(request, timeout_s=...)"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_the_look_finds_dangerous_code(code: str) -> None:
    """The first test can fail."""
    assert any(dangerous(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "f'SELECT {name} FROM t'",
        "'SELECT * FROM ' + table",
        "'SELECT * FROM %s' % table",
        "'SELECT * FROM {}'.format(table)",
        "f'SELECT {_quoted(name)} FROM t'",
        "f'DROP TABLE {self.table}'",
    ],
)
def test_the_look_finds_joined_sql(code: str) -> None:
    """The second test can fail."""
    parts = [part for node in ast.walk(ast.parse(code)) for part in joined_parts(node)]
    assert parts
    assert not all(fixed(part) for part in parts)
