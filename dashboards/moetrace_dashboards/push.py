"""What Grafana has against what it should have, and the calls that make up the difference.

Idempotent: a second push finds nothing to do. Alert rules live in Prometheus and are pushed only where
asked for (schemas/decisions/0006).
"""

from __future__ import annotations

import difflib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moetrace_dashboards import grafana_alerts
from moetrace_dashboards.config import CLICKHOUSE_TYPE, FOLDER_TITLE, FOLDER_UID, PROMETHEUS_TYPE, Config
from moetrace_dashboards.grafana_api import TIMEOUT_S, GrafanaApi, PushError, spoken
from moetrace_dashboards.queries.sql import PLACEMENT_EPOCHS
from moetrace_schemas.wording import count

TOKEN, TOKEN_FILE, CA_FILE = "MOETRACE_TOKEN", "MOETRACE_TOKEN_FILE", "MOETRACE_CA_FILE"
"""How every command finds what to show to a collector; never on the command line."""
ANNOTATION_TAGS = ["moetrace", "placement"]
_SET_BY_GRAFANA = ("id", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What should be in Grafana."""

    dashboards: dict[str, dict[str, Any]]
    """Name -> dashboard."""
    prometheus_url: str = ""
    """Empty: a data source of the type must be there."""
    clickhouse: str = ""
    """host:port of ClickHouse's HTTP interface; empty as above."""
    alerts: Config | None = None
    """Thresholds of alert rules for Grafana's own engine; None: no alert rules."""
    collector_url: str = ""
    """Where placement epochs are asked for; empty: no annotations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do."""

    title: str
    apply: Callable[[], None]
    diff: str = field(default="")


def plan(api: GrafanaApi, wanted: Wanted) -> list[Change]:
    """Everything that differs, in the order in which it must be applied.

    Raises:
        PushError: Grafana or the collector cannot be asked, or a data source is missing.
    """
    api.check()
    return [
        *_datasources(api, wanted),
        *_folder(api),
        *_dashboards(api, wanted.dashboards),
        *(_alert_rules(api, wanted) if wanted.alerts is not None else ()),
        *(_annotations(api, wanted.collector_url) if wanted.collector_url else ()),
    ]


def _datasources(api: GrafanaApi, wanted: Wanted) -> list[Change]:
    there = api.datasources()
    bodies = [
        (PROMETHEUS_TYPE, "--prometheus-url", _prometheus(wanted.prometheus_url)),
        (CLICKHOUSE_TYPE, "--clickhouse", _clickhouse(wanted.clickhouse)),
    ]
    changes = []
    for kind, option, body in bodies:
        if body is None:
            if not any(source["type"] == kind for source in there):
                raise PushError(f"no data source of type {kind} in {api.url}: add one, or give {option}")
            continue
        found = next((source for source in there if source["uid"] == body["uid"]), None)
        if found is None:
            changes.append(
                Change(
                    title=f"create data source {body['name']}",
                    apply=partial(api.create_datasource, body),
                )
            )
            continue
        now = {key: found.get(key) for key in body}
        # Grafana adds defaults of its own to the settings; only ours are compared.
        settings = found.get("jsonData") or {}
        now["jsonData"] = {key: settings.get(key) for key in body["jsonData"]}
        if now != body:
            changes.append(
                Change(
                    title=f"update data source {body['name']}",
                    apply=partial(api.update_datasource, body["uid"], body),
                    diff=_diff(now, body),
                )
            )
    return changes


def _prometheus(url: str) -> dict[str, Any] | None:
    if not url:
        return None
    return {
        "uid": grafana_alerts.DATASOURCE_UID,
        "name": "moetrace Prometheus",
        "type": PROMETHEUS_TYPE,
        "access": "proxy",
        "url": url,
        "jsonData": {"httpMethod": "POST"},
    }


def _clickhouse(address: str) -> dict[str, Any] | None:
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PushError(f"--clickhouse {address}: host:port expected, as in clickhouse:8123")
    return {
        "uid": "moetrace-clickhouse",
        "name": "moetrace ClickHouse",
        "type": CLICKHOUSE_TYPE,
        "access": "proxy",
        "url": "",
        "jsonData": {"host": host, "port": int(port), "protocol": "http", "defaultDatabase": "moetrace"},
    }


def _folder(api: GrafanaApi) -> list[Change]:
    if api.folder(FOLDER_UID) is not None:
        return []
    return [
        Change(
            title=f"create folder {FOLDER_TITLE}", apply=partial(api.create_folder, FOLDER_UID, FOLDER_TITLE)
        )
    ]


def _dashboards(api: GrafanaApi, dashboards: dict[str, dict[str, Any]]) -> list[Change]:
    changes = []
    for name, dashboard in dashboards.items():
        found = api.dashboard(dashboard["uid"])
        now = {} if found is None else _without(found["dashboard"])
        moved = found is not None and found["meta"].get("folderUid") != FOLDER_UID
        if found is None or moved or now != _without(dashboard):
            changes.append(
                Change(
                    title=f"{'create' if found is None else 'update'} dashboard {name}",
                    apply=partial(api.save_dashboard, dashboard, FOLDER_UID),
                    diff=_diff(now, _without(dashboard)) if found is not None else "",
                )
            )
    return changes


def _alert_rules(api: GrafanaApi, wanted: Wanted) -> list[Change]:
    assert wanted.alerts is not None
    uid = _prometheus_uid(api, wanted)
    changes = []
    for rule in grafana_alerts.alert_rules(wanted.alerts, uid):
        found = api.alert_rule(rule["uid"])
        if found is None:
            changes.append(
                Change(title=f"create alert rule {rule['title']}", apply=partial(api.create_alert_rule, rule))
            )
        elif grafana_alerts.differs(found, rule):
            changes.append(
                Change(
                    title=f"update alert rule {rule['title']}",
                    apply=partial(api.update_alert_rule, rule),
                    diff=_diff(grafana_alerts.common(found, rule), rule),
                )
            )
    return changes


def _prometheus_uid(api: GrafanaApi, wanted: Wanted) -> str:
    """The data source that this push makes, else the first of its type that is there."""
    if wanted.prometheus_url:
        return grafana_alerts.DATASOURCE_UID
    return next(str(source["uid"]) for source in api.datasources() if source["type"] == PROMETHEUS_TYPE)


def _annotations(api: GrafanaApi, collector_url: str) -> list[Change]:
    """One per run and placement; its text follows the ledger, whose verdict comes later than the change."""
    there = {
        (note["time"], str(note["text"]).split("\n", 1)[0]): note for note in api.annotations(ANNOTATION_TAGS)
    }
    changes = []
    for epoch in _placement_epochs(collector_url):
        text = _annotation_text(epoch)
        title = text.split("\n", 1)[0]
        time_ms = int(epoch["time_ms"])
        note = there.get((time_ms, title))
        if note is None:
            changes.append(
                Change(
                    title=f"create annotation {title}",
                    apply=partial(api.create_annotation, time_ms, text, ANNOTATION_TAGS),
                )
            )
        elif note["text"] != text:
            changes.append(
                Change(
                    title=f"update annotation {title}",
                    apply=partial(api.update_annotation, int(note["id"]), text),
                    diff=_diff({"text": note["text"]}, {"text": text}),
                )
            )
    return changes


def _annotation_text(epoch: dict[str, Any]) -> str:
    """What changed and what it was judged to be, as the ledger has it; a line each."""
    lines = [f"run {epoch['run_id']}: placement {epoch['placement']}"]
    if not int(epoch["is_announced"]):
        lines.append("nobody announced its map")
    elif epoch["experts_copied"] is not None:
        after = f"after placement {epoch['before']}: " if int(epoch["before"]) else ""
        size = "" if epoch["copied_bytes"] is None else f" ({int(epoch['copied_bytes']) / 1e9:.3g} GB)"
        replicas = int(epoch["replicas_added"] or 0)
        copied = count(int(epoch["experts_copied"]), "expert")
        lines.append(
            f"{after}{copied} copied{size}, {replicas:+d} {'replica' if abs(replicas) == 1 else 'replicas'}"
        )
    lines.append(epoch["sentence"] or "not judged yet")
    return "\n".join(lines)


def _placement_epochs(collector_url: str) -> list[dict[str, Any]]:
    headers = {"Content-Type": "text/plain; charset=utf-8"}
    request = urllib.request.Request(
        f"{collector_url.rstrip('/')}/?default_format=JSONEachRow&database=moetrace",
        data=PLACEMENT_EPOCHS.encode(),
        headers=headers,
    )
    if token := _collector_token():
        # Not a plain header: it would follow a redirect to another host.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        context = ssl.create_default_context(cafile=os.environ.get(CA_FILE) or None)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return [json.loads(line) for line in answer.read().decode().splitlines()]
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip().splitlines()
        raise PushError(
            f"the collector at {collector_url} answers {error.code} "
            f"({said[0][:200] if said else error.reason}): "
            f"set {TOKEN} or {TOKEN_FILE} to a token with scope read"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = spoken(error)
        raise PushError(f"no collector answers at {collector_url} ({reason}): check --collector") from error


def _collector_token() -> str:
    path = os.environ.get(TOKEN_FILE, "")
    if token := os.environ.get(TOKEN, "").strip():
        return token
    try:
        return Path(path).read_text(encoding="ascii").strip() if path else ""
    except (OSError, ValueError) as error:
        raise PushError(f"{TOKEN_FILE} = {path}: a file with one token expected") from error


def _without(dashboard: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dashboard.items() if key not in _SET_BY_GRAFANA}


def _diff(now: dict[str, Any], wanted: dict[str, Any]) -> str:
    before, after = (json.dumps(side, indent=2, sort_keys=True).splitlines() for side in (now, wanted))
    return "\n".join(difflib.unified_diff(before, after, "in Grafana", "wanted", lineterm="", n=2))
