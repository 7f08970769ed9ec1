"""Options that a command does not know."""

from __future__ import annotations

from itertools import takewhile

import pytest

from moetrace_collectors.cli import main


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["collect", "--port", "4518"], "did you mean --http-port or --grpc-port?"),
        (["collect", "--joint=store"], "did you mean --join"),
        (["collect", "extra"], "unrecognized arguments: extra\n"),
        (["placement", "list", "--databse", "x"], "--databse x; did you mean --database?"),
        (["placement", "verify", "--haed", "x"], "--haed x; did you mean --head?"),
    ],
)
def test_the_commands_own_usage_and_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    """Not the usage of all commands, nor of all parts of one; exit 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    chosen = " ".join(takewhile(str.isalpha, arguments[:-1]))
    assert said.startswith(f"usage: moetrace {chosen} [-h]")
    assert meant in said
    assert "COMMAND" not in said
