"""What the README names works: every command runs, every link leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BY_CI = ("make demo", "make test")
"""Run by .ci/run itself: the tests cannot run themselves."""


def commands() -> list[str]:
    """Every command of the README's bash blocks, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_ci_runs_the_two_main_commands() -> None:
    """`make demo` and `make test` stand in the README and in the CI script."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in BY_CI:
        assert command in commands()
        assert command in script


@pytest.mark.multirank
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """The other commands run in the order in which they stand, as a reader would type them."""
    # A linked .venv would not find its packages: a virtual environment is known by its own path.
    binaries = f"{Path(sys.executable).parent}/"
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for command in commands():
        if command in BY_CI:
            continue
        done = subprocess.run(
            shlex.split(command.replace(".venv/bin/", binaries)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    """Relative links and pictures exist."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
