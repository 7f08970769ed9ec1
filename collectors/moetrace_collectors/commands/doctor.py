"""`moetrace doctor`: the go-live checklist of a run, each line with its figure, its query and what to do."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from moetrace_collectors.ledger.arguments import add_store_arguments, open_store

HELP = "check what must be known of a run before it is relied on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is, what the model should be, and how to print."""
    add_store_arguments(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of the model")
    parser.add_argument("--top-k", type=_whole, metavar="K", help="experts per token, in place of --config")
    parser.add_argument("--experts", type=_whole, metavar="N", help="routed experts per layer")
    parser.add_argument("--shared-experts", type=_whole, metavar="N", help="shared experts per layer")
    parser.add_argument("--prometheus", metavar="URL", help="a Prometheus that should have the alert rules")
    parser.add_argument("--queries", action="store_true", help="print the query behind each line too")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Run every check; 0 where nothing fails, 1 where something does.

    Raises:
        UsageError: no such run, or a file that cannot be read.
    """
    from moetrace_collectors.doctor.checklist import (
        checklist_document,
        checklist_text,
        count,
        read_counted,
        run_checklist,
    )
    from moetrace_collectors.doctor.finding import Status
    from moetrace_collectors.doctor.model_config import ModelShape, read_model_config
    from moetrace_collectors.views.store_reader import choose_run

    shape = ModelShape() if arguments.config is None else read_model_config(arguments.config)
    told = {
        "top_k": arguments.top_k,
        "experts": arguments.experts,
        "shared_experts": arguments.shared_experts,
    }
    shape = replace(shape, **{name: value for name, value in told.items() if value is not None})
    with open_store(arguments) as store:
        run_id = choose_run(store, arguments.run_id)
        counted = read_counted(store, run_id)
        lines = run_checklist(store, run_id, shape=shape, prometheus=arguments.prometheus)
    if arguments.json:
        sys.stdout.write(json.dumps(checklist_document(run_id, lines), allow_nan=False) + "\n")
    else:
        sys.stdout.write(checklist_text(run_id, counted, lines, with_queries=arguments.queries))
    return 1 if count(lines, Status.FAIL) else 0


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a whole number of 0 or more expected, got {text!r}")
    return value
