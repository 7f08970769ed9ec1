"""Runs the checklist: every query, its judgement, and the document and text of the answers."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from moetrace_collectors.counted_steps import CountedSteps
from moetrace_collectors.doctor import checks, queries
from moetrace_collectors.doctor.finding import Finding, Line, Status
from moetrace_collectors.doctor.model_config import ModelShape
from moetrace_collectors.errors import UsageError
from moetrace_collectors.views.store_rows import Row, Store

DOCUMENT_VERSION = 1
HTTP_TIMEOUT_S = 10.0


def read_counted(store: Store, run_id: str) -> CountedSteps:
    """The joined steps that figures are of."""
    row = store.rows(queries.render(queries.COUNTED, database=store.database, run_id=run_id), {})[0]
    return CountedSteps(
        first=int(row["first"]),
        last=int(row["last"]),
        counted=int(row["counted"]),
        warmup=int(row["warm"]),
    )


def run_checklist(
    store: Store, run_id: str, *, shape: ModelShape | None, prometheus: str | None
) -> tuple[Line, ...]:
    """Every line in order.

    Args:
        store: where the run is.
        run_id: the run.
        shape: of the model, where its config was given.
        prometheus: address of a Prometheus that should have the alert rules.

    Raises:
        UsageError: the store does not answer.
    """

    def sql(template: str) -> str:
        return queries.render(template, database=store.database, run_id=run_id)

    def rows(template: str) -> list[Row]:
        return store.rows(sql(template), {})

    topology = rows(queries.TOPOLOGY)
    ep_size = int(topology[0]["largest_ep_size"]) if topology else 1
    received = rows(queries.RECEIVED)
    answers: list[tuple[str, str, str, Finding]] = [
        (
            "instrumentation_coverage",
            "Instrumentation covers the model",
            queries.COVERAGE,
            checks.coverage(rows(queries.COVERAGE)),
        ),
        (
            "model_shape",
            "Top-k and shared experts as in the model's config",
            queries.MODEL_SHAPE,
            checks.model_shape(rows(queries.MODEL_SHAPE), shape),
        ),
        ("drops_and_overflow", "Drops and overflow", queries.DROPS, checks.drops(rows(queries.DROPS))),
        ("topology_known", "Topology is known", queries.TOPOLOGY, checks.topology(topology)),
        (
            "all_to_all_percentiles",
            "All-to-all percentiles are measured",
            queries.ALL_TO_ALL,
            checks.all_to_all(rows(queries.ALL_TO_ALL), ep_size=ep_size),
        ),
        (
            "cross_node_share",
            "Share of rows across nodes",
            queries.CROSS_NODE,
            checks.cross_node(rows(queries.CROSS_NODE)),
        ),
        (
            "hot_experts_on_one_device",
            "Hot experts on one device",
            queries.HOT_EXPERTS,
            checks.hot_experts(rows(queries.HOT_EXPERTS), received=int(received[0]["received"])),
        ),
        (
            "overlap_possible",
            "Exchanges can overlap with compute",
            queries.OVERLAP,
            checks.overlap(rows(queries.OVERLAP)),
        ),
        (
            "prefill_and_decode_apart",
            "Prefill and decode are apart",
            queries.FORWARD_MODES,
            checks.forward_modes(rows(queries.FORWARD_MODES)),
        ),
    ]
    lines = [
        Line(name=name, title=title, finding=finding, query=sql(template), query_language="sql")
        for name, title, template, finding in answers
    ]
    lines.append(_alert_rules(prometheus))
    lines.append(
        Line(
            name="rollback_target_present",
            title="A rollback target is present",
            finding=checks.rollback(rows(queries.ROLLBACK)),
            query=sql(queries.ROLLBACK),
            query_language="sql",
        )
    )
    return tuple(lines)


def _alert_rules(prometheus: str | None) -> Line:
    address = (prometheus or "http://localhost:9090").rstrip("/")
    url = queries.ALERT_RULES.replace("{prometheus}", address)
    if prometheus is None:
        finding = checks.alert_rules(None)
    else:
        if not prometheus.startswith(("http://", "https://")):
            raise UsageError(f"--prometheus {prometheus}: an address as in http://127.0.0.1:9090 expected")
        finding = _ask(url)
    return Line(
        name="alert_rules_loaded",
        title="Alert rules are loaded",
        finding=finding,
        query=url,
        query_language="http",
    )


def _ask(url: str) -> Finding:
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            document = json.loads(answer.read())
        return checks.alert_rules(document["data"]["groups"])
    except http.client.HTTPException:
        return checks.alert_rules(None, problem=f"{url} does not answer as Prometheus does (no HTTP)")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        return checks.alert_rules(None, problem=f"{url} does not answer as Prometheus does ({reason})")


def count(lines: Sequence[Line], status: Status) -> int:
    """Lines of a status."""
    return sum(line.finding.status is status for line in lines)


def checklist_document(run_id: str, lines: Sequence[Line]) -> dict[str, Any]:
    """Plain JSON types; the schema is published as doctor_result.schema.json."""
    return {
        "document_version": DOCUMENT_VERSION,
        "run_id": run_id,
        "passed": count(lines, Status.PASS),
        "failed": count(lines, Status.FAIL),
        "unknown": count(lines, Status.UNKNOWN),
        "checks": [
            {
                "name": line.name,
                "title": line.title,
                "status": line.finding.status.value,
                "figure": line.finding.figure,
                "reason": line.finding.reason,
                "fix": line.finding.fix,
                "query_language": line.query_language,
                "query": line.query,
            }
            for line in lines
        ],
    }


def checklist_text(run_id: str, counted: CountedSteps, lines: Sequence[Line], *, with_queries: bool) -> str:
    """A block per line for a terminal."""
    said = [f"run {run_id}", f"Figures: {counted.sentence()}; coverage and hosts: all steps"]
    for line in lines:
        finding = line.finding
        said += [
            "",
            f"[{finding.status.value:^7}] {line.title}: {finding.figure}",
            f"          {finding.reason}",
        ]
        if finding.fix is not None:
            said.append(f"          fix: {finding.fix}")
        if with_queries:
            said += [f"          {part}" for part in line.query.splitlines()]
    said += [
        "",
        f"{count(lines, Status.PASS)} pass, {count(lines, Status.FAIL)} fail, "
        f"{count(lines, Status.UNKNOWN)} unknown"
        + ("" if with_queries else "; --queries shows the query behind each line"),
    ]
    return "\n".join(said) + "\n"
