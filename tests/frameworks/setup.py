"""Sets up environments of frameworks: `python tests/frameworks/setup.py megatron deepspeed torch==2.8.0`.

Each is a virtual environment below FRAMEWORKS_DIR (default `.frameworks`) that sees the packages of the
running interpreter behind its own, so that torch is there once; a constraint keeps pip from taking
another build of it. requirements/<name>.txt is installed as usual, <name>.no-deps.txt after it and
without dependencies, for packages that ask for what a CPU machine neither has nor needs.

`torch==VERSION` makes an environment with that release of torch in front of everything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements"
DEFAULT = ("transformers4", "megatron", "fairscale", "deepspeed", "megablocks")
"""About 300 MB beside torch; all others are set up by name."""


def known() -> list[str]:
    """Names of environments."""
    return sorted({path.name.partition(".")[0] for path in REQUIREMENTS.glob("*.txt")})


def set_up(name: str, root: Path) -> None:
    """Create or complete one environment; nothing is done where it is there and unchanged."""
    target, wanted = root / name, _wanted(name)
    ready = target / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    python = _create(target, behind=sysconfig.get_path("purelib"))
    constraint = target / "constraint.txt"
    constraint.write_text(f"torch=={version('torch')}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraint]
    without_ops = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    for ending, options in ((".txt", ()), (".no-deps.txt", ("--no-deps", "--no-build-isolation"))):
        listed = REQUIREMENTS / f"{name}{ending}"
        if listed.exists():
            subprocess.run([*pip, *options, "--requirement", listed], check=True, env=without_ops)
    ready.write_text(wanted)


def set_up_torch(release: str, root: Path) -> None:
    """Create the environment torch-<release>; nothing is done where it is there."""
    target = root / f"torch-{release}"
    shared = sysconfig.get_path("purelib")
    ready = target / ".ready"
    if ready.exists() and ready.read_text() == shared:
        return
    # Like a folder of packages, and not like a plain one: what is installed editable is seen too.
    python = _create(target, behind=f"import site; site.addsitedir({shared!r})")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={release}"], check=True)
    ready.write_text(shared)


def _create(target: Path, behind: str) -> Path:
    """A new environment's interpreter; `behind` is the line of a .pth file that adds packages to its own."""
    venv.create(target, with_pip=True, clear=target.exists())
    python = target / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(purelib, "shared.pth").write_text(f"{behind}\n")
    return python


def _wanted(name: str) -> str:
    """What an environment was made from: changes when it must be made anew."""
    lists = sorted(REQUIREMENTS.glob(f"{name}.*"))
    return "\n".join([version("torch"), *(path.read_text() for path in lists)])


def main() -> None:
    """Set up the named environments, or the default ones."""
    root = Path(os.environ.get("FRAMEWORKS_DIR", HERE.parents[1] / ".frameworks"))
    for name in sys.argv[1:] or DEFAULT:
        if name.startswith("torch=="):
            release = name.removeprefix("torch==")
            print(f"{name}: {root / f'torch-{release}'}", flush=True)
            set_up_torch(release, root)
            continue
        if name not in known():
            raise SystemExit(f"{name}: no such environment; known: {', '.join(known())}")
        print(f"{name}: {root / name}", flush=True)
        set_up(name, root)


if __name__ == "__main__":
    main()
