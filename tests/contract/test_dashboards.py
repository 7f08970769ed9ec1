"""Generated dashboards and rules: valid for Grafana and Prometheus, and only of names in the catalogue."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moetrace_dashboards import build
from moetrace_dashboards.alerts import alerts
from moetrace_dashboards.config import UIDS, Config
from moetrace_dashboards.queries.rules import RECORDING_RULES
from moetrace_schemas import metrics

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "tests" / "data" / "grafana_jsonschema"
GENERATED = ROOT / "dashboards" / "generated"
RUNBOOKS = ROOT / "dashboards" / "runbooks"
NAMES = sorted(build.DASHBOARDS)
CATALOGUE = {spec.name: spec for spec in metrics.ALL}
RECORDED = {rule.record for rule in RECORDING_RULES}
SQL_SCHEMA = (ROOT / "schemas" / "moetrace_schemas" / "clickhouse" / "schema.sql").read_text()
SCRAPE_LABELS = {"job", "instance", "le"}


def schema(name: str) -> dict[str, Any]:
    """One of Grafana's published schemas."""
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.jsonschema.json").read_text())
    return loaded


def check(document: object, name: str, definition: str) -> None:
    """Validate against one definition of a schema."""
    rules = schema(name)
    jsonschema.validate(document, {**rules, "$ref": f"#/definitions/{definition}"})


def dashboard(name: str) -> dict[str, Any]:
    """A committed dashboard."""
    loaded: dict[str, Any] = json.loads((GENERATED / "grafana" / f"{name}.json").read_text())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    """Its panels."""
    found: list[dict[str, Any]] = dashboard(name)["panels"]
    return found


def targets() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(dashboard, panel title, target) of every query."""
    for name in NAMES:
        for panel in panels(name):
            for target in panel["targets"]:
                yield name, panel["title"], target


def expressions() -> Iterator[str]:
    """Every PromQL text: panels, variables, annotations, rules and alerts."""
    for name in NAMES:
        board = dashboard(name)
        yield from (v["query"] for v in board["templating"]["list"] if v["type"] == "query")
        yield from (a["expr"] for a in board["annotations"]["list"])
    yield from (target["expr"] for _, _, target in targets() if "expr" in target)
    yield from (rule.expr for rule in RECORDING_RULES)
    yield from (alert.expr for alert in alerts(Config()))


def test_what_is_committed_is_what_the_code_makes() -> None:
    """`build --check`: no generated file is missing, different or left over."""
    assert build.stale(build.files(Config()), build.GENERATED) == []


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_are_valid_for_grafana(name: str) -> None:
    """No error against Grafana's schemas: the dashboard, each panel's options, fields and queries."""
    check(dashboard(name), "dashboard", "Dashboard")
    for panel in panels(name):
        if panel["type"] in ("timeseries", "heatmap"):
            check(panel["options"], panel["type"], "Options")
            check(panel["fieldConfig"]["defaults"].get("custom", {}), panel["type"], "FieldConfig")
        for target in panel["targets"]:
            if "expr" in target:
                check(target, "prometheus", "Dataquery")


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_shows(name: str) -> None:
    """No panel without title, description, unit and thresholds; ids are unique, the uid is the fixed one."""
    assert dashboard(name)["uid"] == UIDS[name]
    assert len({panel["id"] for panel in panels(name)}) == len(panels(name))
    for panel in panels(name):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"], panel
        assert len(panel["description"]) >= 20, panel["title"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"], panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_lie_on_the_grid_without_overlap(name: str) -> None:
    """Grafana would move panels that overlap or stand out, and the layout would not be the one committed."""
    taken: set[tuple[int, int]] = set()
    for panel in panels(name):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_links_lead_to_dashboards_that_exist() -> None:
    """Links of panels, cells and alerts use the fixed uids only."""
    texts = [json.dumps(dashboard(name)) for name in NAMES]
    texts.append((GENERATED / "prometheus" / "alerts.yaml").read_text())
    found = {uid for text in texts for uid in re.findall(r"/d/([\w-]+)", text)}
    assert found
    assert found <= set(UIDS.values())


def test_variables_that_queries_use_are_there() -> None:
    """Every $variable of a query is a variable of its dashboard or one of Grafana's own."""
    for name in NAMES:
        board = dashboard(name)
        known = {variable["name"] for variable in board["templating"]["list"]}
        for panel in board["panels"]:
            for target in panel["targets"]:
                text = target.get("expr") or target["rawSql"]
                used = set(re.findall(r"\$\{?(\w+)", text))
                assert {v for v in used if not v.startswith("__")} <= known, panel["title"]


def test_promql_uses_only_names_of_the_catalogue() -> None:
    """Metrics are in the catalogue or recorded, and their matchers use their own labels."""
    for expression in expressions():
        used = re.findall(r"(?<![\w:])([a-z_]+:moetrace_[\w:]+|moetrace_\w+)(?:\{([^}]*)\})?", expression)
        assert used, expression
        for name, matchers in used:
            if ":" in name:
                assert name in RECORDED, name
                continue
            spec = CATALOGUE.get(name) or CATALOGUE.get(re.sub(r"_(bucket|sum|count)$", "", name))
            assert spec is not None, name
            assert (spec.name == name) != (spec.kind == "histogram"), name
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
            assert labels <= set(spec.labels) | SCRAPE_LABELS, (name, labels)


def test_sql_uses_only_tables_of_the_catalogue() -> None:
    """Tables exist, with database; columns are checked by the engine, which runs every query."""
    statements = [target["rawSql"] for _, _, target in targets() if "rawSql" in target]
    assert statements
    for statement in statements:
        tables = re.findall(r"(?:FROM|JOIN)\s+([a-z_.]+)", statement)
        assert tables, statement
        for table in tables:
            assert f"CREATE TABLE {table}\n" in SQL_SCHEMA, table


def test_every_alert_has_a_runbook_and_a_promtool_test() -> None:
    """One runbook and one test per alert, none left over; the address is added by code."""
    names = {alert.name for alert in alerts(Config())}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == names
    assert {path.stem for path in (ROOT / "tests" / "alerts").glob("Moe*.yaml")} == names
    document = yaml.safe_load((GENERATED / "prometheus" / "alerts.yaml").read_text())
    for rule in document["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"{Config().runbook_base_url}/{rule['alert']}.md"


@pytest.mark.parametrize("name", sorted(alert.name for alert in alerts(Config())))
def test_runbooks_have_the_same_parts(name: str) -> None:
    """Meaning, impact, how to tell causes apart, and what to do, in this order."""
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert text.startswith(f"# {name}\n")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_accepts_the_rules() -> None:
    """`promtool check rules` finds nothing to say, lint included."""
    files = [str(path) for path in sorted((GENERATED / "prometheus").glob("*.yaml"))]
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint-fatal", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize("name", sorted(alert.name for alert in alerts(Config())))
def test_alerts_are_quiet_then_fire_then_resolve(name: str) -> None:
    """The promtool test of the alert passes, and has a quiet, a firing and a resolved moment."""
    path = ROOT / "tests" / "alerts" / f"{name}.yaml"
    cases = [case for test in yaml.safe_load(path.read_text())["tests"] for case in test["alert_rule_test"]]
    states = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name]
    # Runs of equal states: quiet, firing, resolved.
    assert [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state][:3] == [
        False,
        True,
        False,
    ]
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
