"""The read endpoint lets reading statements pass and nothing that reaches outside the store."""

from __future__ import annotations

import pytest

from moetrace_collectors.query_guard import RefusedQueryError, check_query


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "select * from step_verdicts where run_id = {run:String} FORMAT JSON;",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "SHOW TABLES",
        "DESCRIBE TABLE step_verdicts",
        "EXPLAIN SELECT 1",
        "EXISTS TABLE step_verdicts",
        "-- the file of today\nSELECT 1 /* into outfile */",
        "SELECT 'file', 'it''s', 'a \\' quote', 'unicode \u00e9' AS \"a column\"",
        "SELECT quantile(0.5)(worth_ns), [1, 2][1], tuple(1, 2).1, x -> x + 1, 1e-3 FROM `step_verdicts`",
        "SELECT a.b, m['k'], ? FROM t WHERE a <= 3 AND b != 4 OR c % 2 = 1 AND d || 'x' = 'y'",
    ],
)
def test_reading_statements_pass(sql: str) -> None:
    """Ordinary reading SQL is not in the way of the guard."""
    check_query(sql, {"run": "r"})


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "INSERT INTO step_verdicts VALUES (1)",
        "DROP TABLE step_verdicts",
        "KILL QUERY WHERE 1",
        "SET readonly = 0",
        "USE system",
        "SYSTEM SHUTDOWN",
        "BACKUP TABLE t TO File('/tmp/x')",
        "SELECT 1; DROP TABLE step_verdicts",
        "SELECT 1; SELECT 2",
    ],
)
def test_other_statements_are_refused(sql: str) -> None:
    """Only one statement, and only one that reads."""
    with pytest.raises(RefusedQueryError):
        check_query(sql, {})


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT file('/etc/passwd')",
        "SELECT FILE ('/etc/passwd')",
        "SELECT `file`('/etc/passwd')",
        "SELECT \"file\"('/etc/passwd')",
        "SELECT `fi\\x6ce`('/etc/passwd')",
        "SELECT /* */ file /* */ ('/etc/passwd')",
        "SELECT \u201cfile\u201d('/etc/passwd')",
        "SELECT\u00a0file('/etc/passwd')",
        "SELECT 'a\\'' || file('/etc/passwd') || '\\''",
        "SELECT $$a$$, file('/etc/passwd')",
        "SELECT 1 INTO OUTFILE '/tmp/x'",
        "SELECT 1 into/**/outfile '/tmp/x'",
        "SELECT 1 #\n INTO OUTFILE '/tmp/x'",
        "DESCRIBE url('http://127.0.0.1/x', 'auto')",
        "DESC file('/etc/passwd')",
        "SELECT * FROM eval('SELECT 1')",
        "SELECT * FROM Python(settings)",
        "SELECT * FROM system.stack_trace",
        "SELECT 'unterminated",
    ],
)
def test_what_reaches_outside_is_refused(sql: str) -> None:
    """Files and addresses cannot be named, however the name is spelt; what cannot be read is refused."""
    with pytest.raises(RefusedQueryError):
        check_query(sql, {})


def test_a_parameter_cannot_name_a_function() -> None:
    """An Identifier placeholder does not smuggle a refused name in."""
    with pytest.raises(RefusedQueryError, match="file is not available here"):
        check_query("SELECT {f:Identifier}('/etc/passwd')", {"f": "file"})


@pytest.mark.parametrize("sql", ["'a\nb'", '"a\x1b[2J" x', "x" * 5_000, "`\n`"])
def test_a_refusal_quotes_the_statement_on_one_short_line(sql: str) -> None:
    """What stands first in a statement is quoted as printable text, and cut."""
    with pytest.raises(RefusedQueryError) as error:
        check_query(sql, {})
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 200
