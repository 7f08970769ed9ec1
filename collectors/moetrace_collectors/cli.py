"""The command line: argument parsing and exit codes; the only place that exits.

Every command is a module of `moetrace_collectors.commands` with `HELP`, `add_arguments(parser)` and
`run(arguments) -> int`. Modules are imported only when their command is chosen (or help is asked
for), so that a missing extra breaks one command and not all of them.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from moetrace_collectors.errors import UsageError

COMMANDS = (
    "demo",
    "collect",
    "query",
    "report",
    "top",
    "export",
    "analyze",
    "load",
    "replay",
    "placement",
    "doctor",
    "simulate",
    "migrate",
    "join",
    "dashboards",
)
EXTRAS = {name: name if name in ("demo", "dashboards") else "collector" for name in COMMANDS}
"""The extra that brings what a command imports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 fine, 1 the command found a fault, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="moetrace",
        description="Which rank, layer and phase of a Mixture-of-Experts step made it slow, and why.",
    )
    parser.add_argument("--version", action="version", version=f"moetrace {version('moetrace')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("clickhouse_connect", "urllib3.connectionpool"):
        # They warn of what a command then says itself, in one line.
        logging.getLogger(name).setLevel(logging.ERROR)
    chosen = arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS
    try:
        _check_text(arguments)
        for name in chosen:
            try:
                module = importlib.import_module(f"moetrace_collectors.commands.{name}")
            except ModuleNotFoundError as error:
                # Of this package's own modules none is optional.
                if (error.name or "").startswith("moetrace"):
                    raise
                raise UsageError(
                    f"{name} needs {error.name}: pip install 'moetrace[{EXTRAS[name]}]'"
                ) from error
            sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            # In the command's own words: its usage, and what was meant.
            chosen_parser = _innermost(commands.choices[parsed.command], parsed)
            chosen_parser.error(_unknown(unknown, chosen_parser))
        code: int = parsed.run(parsed)
    except UsageError as error:
        print(f"moetrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `moetrace query ... | head`: the reader has gone, which is no fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"moetrace: {error.filename or 'output'}: no space left on the device", file=sys.stderr)
        return 2
    return code


def _innermost(command: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command's own sub-command that was chosen, as deep as they go."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = action.choices.get(str(getattr(parsed, action.dest, "")))
            if chosen is not None:
                return _innermost(chosen, parsed)
    return command


def _unknown(arguments: Sequence[str], command: argparse.ArgumentParser) -> str:
    """What is wrong with arguments that a command does not know, and which of its options may be meant."""
    options = [
        option for action in command._actions for option in action.option_strings if option.startswith("--")
    ]
    meant: list[str] = []
    for name in (text.split("=")[0] for text in arguments if text.startswith("--")):
        parts = set(name.strip("-").split("-"))
        same = [one for one in options if parts & set(one.strip("-").split("-"))]
        meant += same or difflib.get_close_matches(name, options, n=1)
    said = f"unrecognized arguments: {' '.join(arguments)}"
    listed = " or ".join(dict.fromkeys(meant))
    return f"{said}; did you mean {listed}?" if listed else said


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse what the system could not read as text: every command would fail on it somewhere else.

    Raises:
        UsageError: an argument is not in UTF-8.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="replace").decode()[:60]
            raise UsageError(f"argument {number} ({shown}): text in UTF-8 expected") from None


if __name__ == "__main__":
    sys.exit(main())
