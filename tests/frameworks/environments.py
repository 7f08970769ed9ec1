"""Interpreters of frameworks that need an environment of their own, and how cases run in them.

`make test-frameworks` sets the environments up (tests/frameworks/setup.py); FRAMEWORKS_DIR says where they
are, `.frameworks` in the repository by default. A framework that the running interpreter has needs none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = Path(__file__).resolve().parent / "cases"
TIMEOUT_S = 240


def root() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("FRAMEWORKS_DIR", REPOSITORY / ".frameworks"))


def interpreter(name: str, module: str) -> str:
    """The Python that has a framework; skips the test where none has it.

    An empty `module` asks for the environment of its own, where the running one has another release.
    """
    own = root() / name / "bin" / "python"
    if own.exists():
        return str(own)
    try:
        if module and importlib.util.find_spec(module) is not None:
            return sys.executable
    except ModuleNotFoundError:
        pass
    pytest.skip(f"{name} is not installed; `make test-frameworks` sets it up in {own.parent.parent}")


def run_case(python: str, case: str, *arguments: str, ranks: int = 1, **environment: str) -> list[str]:
    """Run a case on some ranks; returns what each printed.

    Raises:
        AssertionError: a rank failed; the message holds what it wrote.
    """
    sources = [REPOSITORY, REPOSITORY / "schemas", REPOSITORY / "tests"]
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        **environment,
    }
    running = [
        subprocess.Popen(
            [python, "-P", "-W", "ignore", str(CASES / f"{case}.py"), *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed, failed = [], []
    try:
        for rank, process in enumerate(running):
            out, err = process.communicate(timeout=TIMEOUT_S)
            printed.append(out)
            if process.returncode:
                failed.append(f"rank {rank} ended with {process.returncode}:\n{out[-2000:]}\n{err[-4000:]}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert not failed, "\n".join(failed)
    return printed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reports(printed: list[str]) -> list[dict[str, Any]]:
    """The object that each rank printed last."""
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]
