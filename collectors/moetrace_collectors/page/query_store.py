"""The collector's own store as the views read it: through the guarded, limited queries that readers get."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict

from moetrace_collectors.errors import UsageError
from moetrace_collectors.read_only_query import Query, QueryError, QueryRunner
from moetrace_collectors.store import escape_parameter, first_line
from moetrace_collectors.views.store_rows import STORED_ROWS, Parameters, Row

MAX_REMEMBERED_BYTES = 32 * 2**20
"""Of answers; at 512 ranks and 61 layers one is some 1 MB."""
_BUSY = 503
_OVER_LIMIT = {413, 504, 507}

logger = logging.getLogger(__name__)


class NoAnswerError(UsageError):
    """The store gave no answer; the message is one sentence for people, `.status` the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class QueryStore:
    """See views.store_rows.Store. Safe to use from several threads, as its runner is.

    Answers asked for with STORED_ROWS are remembered, as the engine gave them: sums over steps that are
    closed, which live refresh and every other reader would have made anew.
    """

    def __init__(self, queries: QueryRunner, *, database: str) -> None:
        self._queries = queries
        self.address = "this collector's store"
        self.database = database
        self._remembered: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, sql: str, parameters: Parameters) -> list[Row]:
        """See Store.

        Raises:
            NoAnswerError: away, busy, or over a limit.
        """
        query = Query(
            sql=sql,
            format="JSONEachRow",
            database=self.database,
            parameters={
                "database": self.database,
                **{name: escape_parameter(str(value)) for name, value in parameters.items()},
            },
            settings={"output_format_json_quote_64bit_integers": "0"},
        )
        key = (sql, json.dumps(query.parameters, sort_keys=True)) if STORED_ROWS in parameters else None
        body = self._recall(key)
        if body is None:
            try:
                body = self._queries.run(query)
            except QueryError as error:
                raise _in_words(error) from error
            self._remember(key, body)
        return [json.loads(line) for line in body.splitlines() if line.strip()]

    def _recall(self, key: tuple[str, str] | None) -> bytes | None:
        with self._lock:
            if key is None or key not in self._remembered:
                return None
            self._remembered.move_to_end(key)
            return self._remembered[key]

    def _remember(self, key: tuple[str, str] | None, body: bytes) -> None:
        if key is None:
            return
        with self._lock:
            self._remembered[key] = body
            while sum(map(len, self._remembered.values())) > MAX_REMEMBERED_BYTES:
                self._remembered.popitem(last=False)


def _in_words(error: QueryError) -> NoAnswerError:
    if error.status == _BUSY:
        return NoAnswerError("The store is busy with other queries; trying again.", status=503)
    if error.status in _OVER_LIMIT:
        return NoAnswerError(
            "This figure needs more than one query may use: ask for fewer steps, or raise the "
            "collector's query_* limits.",
            status=503,
        )
    logger.warning("the page's query failed: %s", first_line(error))
    return NoAnswerError(
        "The store does not answer; what arrives is kept while the collector's queue has room. Trying again.",
        status=503,
    )
