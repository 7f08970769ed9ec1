"""Recording rules as Prometheus reads them."""

from __future__ import annotations

from moetrace_dashboards.queries.rules import RECORDING_RULES

GROUP = "moetrace.recording"


def recording_rules() -> dict[str, object]:
    """The rule file as a document."""
    rules = [{"record": rule.record, "expr": rule.expr} for rule in RECORDING_RULES]
    return {"groups": [{"name": GROUP, "rules": rules}]}
