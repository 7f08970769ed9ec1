"""Folders for targets that read files: they live as long as the process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def scratch_folder() -> Path:
    """An empty folder of one's own, gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="moetrace-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
