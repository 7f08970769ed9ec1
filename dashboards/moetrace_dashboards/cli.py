"""`moetrace dashboards build|check|push`: make, compare, or send to a Grafana."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moetrace_dashboards import build
from moetrace_dashboards.config import Config, ConfigError, load
from moetrace_dashboards.grafana_api import GrafanaApi, PushError
from moetrace_dashboards.push import Wanted, plan

TOKEN_VARIABLE = "MOETRACE_GRAFANA_TOKEN"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action; 0 fine, 1 generated files are stale, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.action == "push":
            return _push(arguments)
    except (ConfigError, PushError) as error:
        print(f"moetrace: {error}", file=sys.stderr)
        return 2
    options = ["--out", str(arguments.out)]
    if arguments.config:
        options += ["--config", str(arguments.config)]
    return build.main([*options, "--check"] if arguments.action == "check" else options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moetrace dashboards", description="Grafana dashboards, recording rules and alerts."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "write dashboards, recording rules and alerts"),
        ("check", "exit 1 if what is there is not what build would write"),
        ("push", "make data sources, folder, dashboards, alert rules and annotations of a Grafana current"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--config", type=Path, metavar="FILE", help="TOML with other thresholds")
        if name != "push":
            action.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory")
            continue
        action.add_argument("--grafana-url", required=True, metavar="URL")
        action.add_argument(
            "--token", default="", help=f"service account token (default: ${TOKEN_VARIABLE}, which ps hides)"
        )
        action.add_argument("--prometheus-url", default="", metavar="URL", help="make this data source")
        action.add_argument("--clickhouse", default="", metavar="HOST:PORT", help="make this data source")
        action.add_argument(
            "--collector", default="", metavar="URL", help="annotate the placement epochs of its runs"
        )
        action.add_argument(
            "--alerts",
            action="store_true",
            help="make the alert rules in Grafana too, where Prometheus does not evaluate them",
        )
        action.add_argument(
            "--dry-run", action="store_true", help="show what would change, and change nothing"
        )
    return parser


def _push(arguments: argparse.Namespace) -> int:
    token = arguments.token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise PushError(f"no token: give --token, or set {TOKEN_VARIABLE}")
    config = load(arguments.config) if arguments.config else Config()
    made = build.files(config)
    wanted = Wanted(
        dashboards={
            Path(name).stem: json.loads(text) for name, text in made.items() if name.startswith("grafana/")
        },
        prometheus_url=arguments.prometheus_url,
        clickhouse=arguments.clickhouse,
        alerts=config if arguments.alerts else None,
        collector_url=arguments.collector,
    )
    changes = plan(GrafanaApi(arguments.grafana_url, token), wanted)
    for change in changes:
        if arguments.dry_run:
            print(f"would {change.title}")
            if change.diff:
                print(change.diff)
        else:
            change.apply()
            print(change.title)
    if not changes:
        print(f"{arguments.grafana_url} is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
