"""Where loads come from, as command line arguments: a dump, or a run in a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.series import LoadSeries, in_order, series_of_recording
from moetrace_collectors.run_directory import newest_run_directory, open_run_directory
from moetrace_schemas.enums import ForwardMode


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """PATH, or --run with where it is; forward mode and cohort."""
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="a dump: SGLang, vLLM or Megatron, JSON, CSV, NPZ, Parquet (FILE#NAME for one of several)",
    )
    parser.add_argument("--run", dest="run_id", metavar="RUN", help="a recorded run, in place of PATH")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--dir", type=Path, metavar="DIR", help="run directory (default: the newest)")
    where.add_argument("--dsn", metavar="DSN", help="store: chdb:///path, clickhouse://host or https://host")
    where.add_argument("--url", metavar="URL", help="a running collector, as in http://127.0.0.1:4318")
    parser.add_argument(
        "--database", default="moetrace", help="database of the tables (default: %(default)s)"
    )
    parser.add_argument(
        "--forward-mode",
        type=ForwardMode,
        choices=list(ForwardMode),
        metavar="MODE",
        help="train, prefill, decode or mixed (default: the one with most pairs)",
    )
    parser.add_argument(
        "--cohort", metavar="NAME", help="one cohort, or one recording of a file (default: all)"
    )
    parser.add_argument(
        "--epoch",
        type=_version,
        metavar="VERSION",
        help="placement version of a run whose steps are read (default: the newest with counts)",
    )
    parser.add_argument(
        "--experts", type=positive, metavar="N", help="logical experts, where routes do not tell them"
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks of an expert-parallel group")
    parser.add_argument(
        "--nodes", type=positive, metavar="N", help="nodes of a group (default: as recorded, else 1)"
    )
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="which expert is in which slot (default: as in the ledger of the run, else experts in order)",
    )
    parser.add_argument(
        "--routes", type=Path, metavar="FILE", help="sampled routes [tokens, layers, top_k] (NPZ or NPY)"
    )
    parser.add_argument(
        "--row-bytes", type=positive_number, metavar="BYTES", help="size of one dispatched row"
    )


def read_loads(arguments: argparse.Namespace) -> tuple[LoadSeries, ...]:
    """Every series of the source, the one with most pairs first.

    Raises:
        UsageError: nothing to read, or both a dump and a run are given.
    """
    in_store = [name for name in ("run_id", "dir", "dsn", "url") if getattr(arguments, name) is not None]
    if arguments.path is not None:
        if in_store:
            flag = "--run" if in_store[0] == "run_id" else f"--{in_store[0]}"
            raise UsageError(f"{arguments.path} and {flag}: give a dump or a run, not both")
        if arguments.epoch is not None:
            raise UsageError(f"--epoch {arguments.epoch}: a dump tells no placement versions; leave it out")
        return _read_dump(arguments.path, arguments.experts)
    if not in_store:
        raise UsageError(
            "nothing to read: give a dump as PATH, or a recorded run with --run RUN, --dir, --dsn or --url"
        )
    # Here and not above: the extra of the store must not break reading dumps.
    from moetrace_collectors.load.store_source import read_series
    from moetrace_collectors.views.store_reader import choose_run
    from moetrace_collectors.views.store_rows import ClientStore, HttpStore, store_of_directory, store_of_dsn

    if arguments.dsn is not None:
        store: ClientStore | HttpStore = store_of_dsn(arguments.dsn, database=arguments.database)
    elif arguments.url is not None:
        store = HttpStore(arguments.url, database=arguments.database)
    else:
        directory = open_run_directory(arguments.dir) if arguments.dir is not None else newest_run_directory()
        store = store_of_directory(directory, database=arguments.database)
    with store:
        return read_series(store, choose_run(store, arguments.run_id), epoch=arguments.epoch)


def _read_dump(path: Path, num_experts: int | None) -> tuple[LoadSeries, ...]:
    from moetrace_collectors.offline.load_dumps import read_load_dumps

    file, _, name = str(path).partition("#")
    if name and path.exists():
        file, name = str(path), ""  # a file that is really called so
    recordings = read_load_dumps(Path(file), num_experts=num_experts)
    chosen = [recording for recording in recordings if not name or recording.source == f"{file}#{name}"]
    if not chosen:
        listed = ", ".join(recording.source.partition("#")[2] for recording in recordings[:12])
        raise UsageError(
            f"{file} holds no recording {name!r}: it holds {listed or 'a single one without a name'}"
        )
    return in_order(
        [series for recording in chosen for series in series_of_recording(recording)], source=file
    )


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of 1 or more expected, got {text!r}")
    return value


def _version(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a placement version of 0 or more expected, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 expected, got {text!r}")
    return value
