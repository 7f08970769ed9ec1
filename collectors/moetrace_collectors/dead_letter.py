"""The dead letter: a file of what was rejected, one JSON object a line, bounded in size.

When the file is full it becomes `<name>.1` (replacing the one before) and a new one is begun, so the
newest rejections are always there and two files are the most there can be. Losing the file loses no
count: every rejection is counted before it comes here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.events import Rejection


class DeadLetter:
    """Appends rejections; one thread owns it."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Open the file for appending.

        Raises:
            UsageError: the file cannot be written.
        """
        self._path = path
        self._max_bytes = max_bytes
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error

    def write(self, rejection: Rejection, *, time_unix_ms: int) -> None:
        """Append one line.

        Raises:
            OSError: the disk does not take it.
        """
        line = json.dumps(
            {
                "time_unix_ms": time_unix_ms,
                "reason": rejection.reason.value,
                "detail": rejection.detail,
                "run_id": rejection.run_id,
                "step": rejection.step,
                "rank": rejection.rank,
                "payload_base64": base64.b64encode(rejection.payload).decode(),
            }
        )
        data = line.encode() + b"\n"
        if self._file.tell() + len(data) > self._max_bytes and self._file.tell() > 0:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab")
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
