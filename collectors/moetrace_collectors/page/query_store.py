"""The collector's own store as the views read it: through the guarded, limited queries that readers get."""

from __future__ import annotations

import json
import logging

from moetrace_collectors.errors import UsageError
from moetrace_collectors.read_only_query import Query, QueryError, QueryRunner
from moetrace_collectors.store import escape_parameter, first_line
from moetrace_collectors.views.store_rows import Parameters, Row

_BUSY = 503
_OVER_LIMIT = {413, 504, 507}

logger = logging.getLogger(__name__)


class NoAnswerError(UsageError):
    """The store gave no answer; the message is one sentence for people, `.status` the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class QueryStore:
    """See views.store_rows.Store. Safe to use from several threads, as its runner is."""

    def __init__(self, queries: QueryRunner, *, database: str) -> None:
        self._queries = queries
        self.address = "this collector's store"
        self.database = database

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
        try:
            body = self._queries.run(query)
        except QueryError as error:
            raise _in_words(error) from error
        return [json.loads(line) for line in body.splitlines() if line.strip()]


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
