"""The OTLP exporter logs every failed request; one line of ours says it once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)


@contextlib.contextmanager
def exporter_silenced() -> Iterator[None]:
    """Its lines of this thread are left out; those of the application's own exporters stay."""
    silence = _SilenceThread(threading.get_ident())
    for name in EXPORTER_LOGGERS:
        logging.getLogger(name).addFilter(silence)
    try:
        yield
    finally:
        for name in EXPORTER_LOGGERS:
            logging.getLogger(name).removeFilter(silence)


class _SilenceThread(logging.Filter):
    def __init__(self, thread: int) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread
