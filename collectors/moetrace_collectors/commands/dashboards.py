"""`moetrace dashboards`: build, check or push what people see in Grafana.

In a process of its own: the service never imports the dashboards, which need packages that it does not.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

from moetrace_collectors.errors import UsageError

HELP = "make Grafana dashboards and alert rules, or push them to a Grafana"
NEEDED = "grafana_foundation_sdk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after the command is for the other process, --help included."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="build, check or push; see build --help")


def run(arguments: argparse.Namespace) -> int:
    """The other process' exit code.

    Raises:
        UsageError: the dashboards' packages are not installed.
    """
    if importlib.util.find_spec(NEEDED) is None:
        raise UsageError(f"dashboards needs {NEEDED}: pip install 'moetrace[dashboards]'")
    command = [sys.executable, "-m", "moetrace_dashboards.cli", *(arguments.arguments or ["--help"])]
    return subprocess.run(command, check=False).returncode
