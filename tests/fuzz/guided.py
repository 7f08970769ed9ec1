"""One target under atheris, which looks for inputs that reach new code; pip install 'moetrace[fuzz]'.

    python tests/fuzz/guided.py "query guard" --inputs 100000

The valid inputs are the corpus to begin with. An input that fails ends the run, with its traceback, and is
written to a file crash-... of the working directory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

root = Path(__file__).parents[2]
sys.path[:0] = [str(root / part) for part in ("", "collectors", "schemas", "dashboards", "tests")]


def main() -> int:
    """Instrument, and run; atheris ends the process itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="name of a target, as run.py prints it")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("guided: atheris is missing: pip install 'moetrace[fuzz]'", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["moetrace_collectors", "moetrace_schemas"]):
        from fuzz.targets import all_targets

    targets = {share.target.name: share.target for share in all_targets()}
    target = targets.get(arguments.target)
    if target is None:
        print(f"guided: no such target; there are {', '.join(sorted(targets))}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)

        def one(data: bytes) -> None:
            target.run(data)

        options = [f"-runs={arguments.inputs}", f"-seed={arguments.seed}", "-timeout=20", "-max_len=20000"]
        atheris.Setup([sys.argv[0], *options, corpus], one)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
