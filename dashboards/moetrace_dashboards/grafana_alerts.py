"""The same alerts as rules of Grafana's own engine, for sites whose Prometheus evaluates none.

Each rule is an instant query A and a threshold C on it. Most expressions return only what is over its
threshold, so that any value fires; where Prometheus holds a firing alert by `ALERTS`, which only it has,
Grafana holds it by the threshold's own way back. Recorded series are still Prometheus' work.

Templates use `.Labels` and `.Values` and no dollar sign, which provisioning files would take for a variable.
"""

from __future__ import annotations

import re
from typing import Any

from moetrace_dashboards.alerts import GROUP, Alert, alerts
from moetrace_dashboards.config import FOLDER_TITLE, FOLDER_UID, UIDS, Config
from moetrace_dashboards.queries import rules

EXPRESSION_UID = "__expr__"
"""Grafana's name for its own expressions."""
DATASOURCE_UID = "moetrace-prometheus"
"""As in provisioning/datasources."""
WINDOW_S = 600
ANYTHING = -1
"""Below every value that an alert's expression can have: ratios, counts and seconds."""
INTERVAL = "60s"
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def alert_rules(config: Config, datasource_uid: str) -> list[dict[str, Any]]:
    """Every alert as Grafana's provisioning API takes it; the uid is the alert's name."""
    return [
        {
            "uid": alert.name,
            "title": alert.name,
            "ruleGroup": GROUP,
            "folderUID": FOLDER_UID,
            "orgID": 1,
            "condition": "C",
            "data": _queries(alert, datasource_uid),
            # An expression that returns nothing is an alert that is quiet.
            "noDataState": "OK",
            "execErrState": "Error",
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": _template(alert.summary),
                "description": _template(alert.description),
                "dashboard": f"/d/{UIDS[alert.dashboard]}",
                "runbook_url": f"{config.runbook_base_url}/{alert.name}.md",
            },
        }
        for alert in alerts(config)
    ]


def provisioning(config: Config) -> dict[str, object]:
    """The same rules as a file that Grafana reads at start."""
    outside = ("ruleGroup", "folderUID", "orgID")
    return {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": GROUP,
                "folder": FOLDER_TITLE,
                "interval": INTERVAL,
                "rules": [
                    {key: value for key, value in rule.items() if key not in outside}
                    for rule in alert_rules(config, DATASOURCE_UID)
                ],
            }
        ],
    }


def differs(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a rule in Grafana is not the wanted one; what Grafana adds of its own does not count."""
    return bool(_common(found, wanted) != {**wanted, "for": seconds(wanted["for"])})


def common(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Of a rule in Grafana, what there is to compare, for a diff."""
    return {**_common(found, wanted), "for": found.get("for")}


def seconds(duration: str) -> float:
    """A Prometheus duration; Grafana writes 60m as 1h."""
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def _common(found: Any, wanted: Any) -> Any:
    if isinstance(wanted, dict) and isinstance(found, dict):
        return {
            key: seconds(str(found.get(key))) if key == "for" else _common(found.get(key), value)
            for key, value in wanted.items()
        }
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return [_common(one, other) for one, other in zip(found, wanted, strict=True)]
    return found


def _queries(alert: Alert, datasource_uid: str) -> list[dict[str, Any]]:
    level = alert.level
    expr = alert.expr if level is None else f"{level.value} > {level.low}"
    queries = [_prometheus("A", expr, datasource_uid)]
    if rules.ROLLBACK_TARGET in alert.description:
        previous = f"0 * ({expr}) + on (run_id) group_left () moetrace_placement_previous_version"
        queries.append(_prometheus("B", previous, datasource_uid))
    return [
        *queries,
        _threshold(ANYTHING if level is None else level.high, None if level is None else level.low),
    ]


def _prometheus(ref_id: str, expr: str, datasource_uid: str) -> dict[str, Any]:
    return {
        "refId": ref_id,
        "queryType": "",
        "relativeTimeRange": {"from": WINDOW_S, "to": 0},
        "datasourceUid": datasource_uid,
        "model": {
            "refId": ref_id,
            "expr": expr,
            "instant": True,
            "range": False,
            "editorMode": "code",
            "intervalMs": 1000,
            "maxDataPoints": 43_200,
        },
    }


def _threshold(over: float, until: float | None) -> dict[str, Any]:
    condition: dict[str, Any] = {"type": "query", "evaluator": {"type": "gt", "params": [over]}}
    if until is not None:
        condition["unloadEvaluator"] = {"type": "lt", "params": [until]}
    return {
        "refId": "C",
        "queryType": "",
        "relativeTimeRange": {"from": WINDOW_S, "to": 0},
        "datasourceUid": EXPRESSION_UID,
        "model": {
            "refId": "C",
            "type": "threshold",
            "datasource": {"type": EXPRESSION_UID, "uid": EXPRESSION_UID},
            "expression": "A",
            "conditions": [condition],
            "intervalMs": 1000,
            "maxDataPoints": 43_200,
        },
    }


def _template(text: str) -> str:
    rollback = "{{ with .Values.B }}{{ .Value }}{{ else }}unknown{{ end }}"
    told = text.replace(rules.ROLLBACK_TARGET, rollback)
    return told.replace("$labels.", ".Labels.").replace("$value", ".Values.A.Value")
