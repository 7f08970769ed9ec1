"""Grafana HTTP API as published, as far as a push uses it: checks requests, answers in the same shapes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "data" / "grafana_jsonschema" / "dashboard.jsonschema.json").read_text()
)
TOKEN = "glsa_test"
STRING, OBJECT, INTEGER = {"type": "string", "minLength": 1}, {"type": "object"}, {"type": "integer"}
DATASOURCE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "type", "access"],
    "properties": {
        "uid": STRING, "name": STRING, "type": STRING, "access": {"enum": ["proxy", "direct"]},
        "url": {"type": "string"}, "jsonData": OBJECT, "isDefault": {"type": "boolean"},
    },
}  # fmt: skip
QUERY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["refId", "datasourceUid", "model", "relativeTimeRange"],
    "properties": {
        "refId": STRING, "queryType": {"type": "string"}, "datasourceUid": STRING, "model": OBJECT,
        "relativeTimeRange": {
            "type": "object", "additionalProperties": False, "required": ["from", "to"],
            "properties": {"from": INTEGER, "to": INTEGER},
        },
    },
}  # fmt: skip
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
ALERT_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "title", "ruleGroup", "folderUID", "orgID", "condition", "data", "noDataState", "execErrState", "for",
    ],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": {"type": "string", "minLength": 1, "maxLength": 190},
        "ruleGroup": {"type": "string", "minLength": 1, "maxLength": 190},
        "folderUID": STRING, "orgID": INTEGER, "condition": STRING,
        "data": {"type": "array", "minItems": 1, "items": QUERY},
        "noDataState": {"enum": ["Alerting", "NoData", "OK"]},
        "execErrState": {"enum": ["OK", "Alerting", "Error"]},
        "for": {"type": "string", "pattern": r"^([0-9]+(ms|[smhdw]))+$"},
        "labels": TEXTS, "annotations": TEXTS, "isPaused": {"type": "boolean"},
    },
}  # fmt: skip
"""ProvisionedAlertRule of Grafana's published API."""
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/api/datasources"): DATASOURCE,
    ("PUT", "/api/datasources/uid/*"): DATASOURCE,
    ("POST", "/api/v1/provisioning/alert-rules"): ALERT_RULE,
    ("PUT", "/api/v1/provisioning/alert-rules/*"): ALERT_RULE,
    ("POST", "/api/folders"): {
        "type": "object",
        "additionalProperties": False,
        "required": ["title"],
        "properties": {"uid": STRING, "title": STRING, "parentUid": STRING},
    },
    ("POST", "/api/dashboards/db"): {
        "type": "object",
        "additionalProperties": False,
        "required": ["dashboard"],
        "properties": {
            "dashboard": {**OBJECT, "required": ["uid", "title"]},
            "folderUid": STRING, "message": STRING, "overwrite": {"type": "boolean"},
        },
    },
    ("POST", "/api/annotations"): {
        "type": "object",
        "additionalProperties": False,
        "required": ["text"],
        "properties": {
            "time": INTEGER, "timeEnd": INTEGER, "text": STRING, "tags": {"type": "array", "items": STRING},
            "dashboardUID": STRING, "panelId": INTEGER,
        },
    },
    ("PATCH", "/api/annotations/*"): {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "time": INTEGER, "timeEnd": INTEGER, "text": STRING, "tags": {"type": "array", "items": STRING},
        },
    },
}  # fmt: skip


ALERT_RULES = "/api/v1/provisioning/alert-rules"


def _pattern(method: str, path: str) -> str:
    if method == "PUT" and path.startswith(f"{ALERT_RULES}/"):
        return f"{ALERT_RULES}/*"
    if method == "PATCH" and path.startswith("/api/annotations/"):
        return "/api/annotations/*"
    return "/api/datasources/uid/*" if "/uid/" in path else path


class FakeGrafana(ThreadingHTTPServer):
    """State of one Grafana."""

    def __init__(self, version: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = version
        self.datasources: list[dict[str, Any]] = []
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.alert_rules: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.faults: list[str] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def grafana(version: str = "11.6.0") -> Iterator[FakeGrafana]:
    """A running one; what was wrong with any request is raised at the end."""
    server = FakeGrafana(version)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
    assert server.faults == []


class _Handler(BaseHTTPRequestHandler):
    server: FakeGrafana

    def do_GET(self) -> None:
        self._answer("GET", {})

    def do_POST(self) -> None:
        self._answer("POST", self._body())

    def do_PUT(self) -> None:
        self._answer("PUT", self._body())

    def do_PATCH(self) -> None:
        self._answer("PATCH", self._body())

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def _answer(self, method: str, body: dict[str, Any]) -> None:
        path = urlsplit(self.path).path
        status, answer = self._route(method, path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        server = self.server
        if path == "/api/health":
            return 200, {"commit": "abc", "database": "ok", "version": server.version}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key", "messageId": "api-key.invalid", "statusCode": 401}
        if method != "GET":
            pattern = (method, _pattern(method, path))
            try:
                jsonschema.validate(body, BODIES[pattern])
                if path == "/api/dashboards/db":
                    jsonschema.validate({**body["dashboard"], "id": 1}, SCHEMA)
            except (KeyError, jsonschema.ValidationError) as error:
                server.faults.append(f"{method} {path}: {error}")
                return 400, {"message": "bad request data"}
            server.writes.append(f"{method} {path}")
        return self._handle(method, path, body)

    def _handle(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        server = self.server
        name = path.rpartition("/")[2]
        if path == "/api/org":
            return 200, {"id": 1, "name": "Main Org."}
        if (method, path) == ("GET", "/api/datasources"):
            return 200, server.datasources
        if (method, path) == ("POST", "/api/datasources"):
            made = {"id": len(server.datasources) + 1, "orgId": 1, "basicAuth": False, **body}
            made["jsonData"] = {**body["jsonData"], "addedByGrafana": True}
            server.datasources.append(made)
            return 200, {
                "datasource": made,
                "id": made["id"],
                "message": "Datasource added",
                "name": body["name"],
            }
        if path.startswith(ALERT_RULES):
            return self._alert_rule(method, name, body)
        if method == "PUT":
            found = next(source for source in server.datasources if source["uid"] == name)
            found.update(body)
            return 200, {"datasource": found, "id": found["id"], "message": "Datasource updated"}
        if path.startswith("/api/folders/"):
            folder = server.folders.get(name)
            return (200, folder) if folder else (404, {"message": "folder not found", "status": "not-found"})
        if path == "/api/folders":
            server.folders[body["uid"]] = {"id": 1, **body, "url": f"/dashboards/f/{body['uid']}/"}
            return 200, server.folders[body["uid"]]
        if path.startswith("/api/dashboards/uid/"):
            found_dashboard = server.dashboards.get(name)
            return (200, found_dashboard) if found_dashboard else (404, {"message": "Dashboard not found"})
        if path == "/api/dashboards/db":
            return self._save(body)
        if (method, path) == ("POST", "/api/annotations"):
            server.annotations.append({"id": len(server.annotations) + 1, **body})
            return 200, {"message": "Annotation added", "id": len(server.annotations)}
        if method == "PATCH":
            next(note for note in server.annotations if str(note["id"]) == name).update(body)
            return 200, {"message": "Annotation patched"}
        wanted = set(parse_qs(urlsplit(self.path).query).get("tags", []))
        return 200, [note for note in server.annotations if wanted <= set(note["tags"])]

    def _alert_rule(self, method: str, uid: str, body: dict[str, Any]) -> tuple[int, Any]:
        server = self.server
        if method == "GET":
            found = server.alert_rules.get(uid)
            return (200, found) if found else (404, {"message": "alert rule not found"})
        if body["folderUID"] not in server.folders:
            return 400, {"message": "invalid alert rule: folder does not exist"}
        if method == "POST" and body["uid"] in server.alert_rules:
            return 409, {"message": "a rule with this UID exists"}
        # Grafana writes durations its own way, and adds to models and rules.
        stored = {
            **json.loads(json.dumps(body)),
            "id": 1,
            "updated": "2026-01-01T00:00:00Z",
            "isPaused": False,
        }
        stored["for"] = {"60m": "1h"}.get(body["for"], body["for"])
        for query in stored["data"]:
            query["model"]["hide"] = False
        server.alert_rules[body["uid"]] = stored
        return (201 if method == "POST" else 200), stored

    def _save(self, body: dict[str, Any]) -> tuple[int, Any]:
        uid = body["dashboard"]["uid"]
        before = self.server.dashboards.get(uid)
        if before and not body.get("overwrite"):
            return 412, {
                "message": "The dashboard has been changed by someone else",
                "status": "version-mismatch",
            }
        if body["folderUid"] not in self.server.folders:
            return 400, {"message": "folder not found"}
        version = before["dashboard"]["version"] + 1 if before else 1
        self.server.dashboards[uid] = {
            "dashboard": {**body["dashboard"], "id": 7, "version": version},
            "meta": {"folderUid": body["folderUid"], "slug": uid, "url": f"/d/{uid}/{uid}"},
        }
        return 200, {"id": 7, "uid": uid, "status": "success", "version": version, "url": f"/d/{uid}/{uid}"}
