"""Alerts as rules of Grafana's own engine: the same names, texts and thresholds as in Prometheus."""

from __future__ import annotations

import re

import pytest
import yaml

from moetrace_dashboards import grafana_alerts
from moetrace_dashboards.alerts import alerts
from moetrace_dashboards.build import GENERATED
from moetrace_dashboards.config import Config

CONFIG = Config()
RULES = {rule["uid"]: rule for rule in grafana_alerts.alert_rules(CONFIG, "some-prometheus")}


def test_every_alert_is_a_rule_of_the_same_name_hold_and_severity() -> None:
    """One rule each; the hold, the severity and the runbook are those of Prometheus' rule."""
    for alert in alerts(CONFIG):
        rule = RULES[alert.name]
        assert (rule["for"], rule["labels"]) == (alert.hold, {"severity": alert.severity})
        assert rule["annotations"]["runbook_url"].endswith(f"/{alert.name}.md")
    assert len(RULES) == len(alerts(CONFIG))


def test_hysteresis_is_the_thresholds_own_and_reads_no_alerts_series() -> None:
    """Grafana has no ALERTS: it fires above the higher bound and goes quiet below the lower one."""
    held = [alert for alert in alerts(CONFIG) if "ALERTS{" in alert.expr]
    assert held
    assert [alert for alert in alerts(CONFIG) if alert.level is not None] == held
    for alert in held:
        query, condition = (
            RULES[alert.name]["data"][0],
            RULES[alert.name]["data"][-1]["model"]["conditions"][0],
        )
        assert alert.level is not None
        assert condition["evaluator"] == {"type": "gt", "params": [alert.level.high]}
        assert condition["unloadEvaluator"] == {"type": "lt", "params": [alert.level.low]}
        assert query["model"]["expr"] == f"{alert.level.value} > {alert.level.low}"
    assert not any("ALERTS" in str(rule) for rule in RULES.values())


def test_a_rule_without_hysteresis_fires_on_whatever_its_expression_returns() -> None:
    """The expression holds the threshold already, as in Prometheus; nothing returned is quiet."""
    rule = RULES["MoeInstrumentationCoverageLost"]
    assert rule["data"][0]["model"]["expr"].endswith(f"< {CONFIG.coverage_ratio}")
    assert rule["data"][-1]["model"]["conditions"][0]["evaluator"]["params"] == [-1]
    assert rule["noDataState"] == "OK"


def test_templates_have_no_dollar_and_only_what_grafana_knows() -> None:
    """Provisioning files take $ for a variable; `query` is a function of Prometheus only."""
    for rule in RULES.values():
        for text in rule["annotations"].values():
            assert "$" not in text
            assert "query" not in text
            for name in re.findall(r"\.Values\.(\w)", text):
                assert name in {query["refId"] for query in rule["data"]}


def test_the_rollback_target_is_a_query_of_its_own() -> None:
    """It carries the labels of the alert, so that Grafana puts both beside each other."""
    rule = RULES["MoePlacementStepTimeRegressed"]
    assert [query["refId"] for query in rule["data"]] == ["A", "B", "C"]
    assert rule["data"][1]["model"]["expr"].endswith(
        "+ on (run_id) group_left () moetrace_placement_previous_version"
    )
    assert "Rollback target: placement {{ with .Values.B }}{{ .Value }}" in rule["annotations"]["description"]


def test_the_provisioning_file_holds_the_same_rules() -> None:
    """As committed: one group in the dashboards' folder, on the provisioned data source."""
    document = yaml.safe_load((GENERATED / "grafana_alerting" / "moetrace.yaml").read_text())
    [group] = document["groups"]
    assert (document["apiVersion"], group["folder"], group["interval"]) == (1, "moetrace", "60s")
    made = {rule["uid"]: rule for rule in group["rules"]}
    assert set(made) == set(RULES)
    for uid, rule in made.items():
        assert rule["condition"] == "C"
        assert {q["datasourceUid"] for q in rule["data"]} == {"moetrace-prometheus", "__expr__"}
        assert rule["annotations"] == RULES[uid]["annotations"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0s", 0), ("15m", 900), ("60m", 3600), ("1h", 3600), ("1h30m", 5400), ("10ms", 0.01)],
)
def test_durations_are_compared_by_their_length(text: str, expected: float) -> None:
    """Grafana writes back 1h for 60m, which is no change."""
    assert grafana_alerts.seconds(text) == pytest.approx(expected)
