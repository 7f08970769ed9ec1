"""The few calls of Grafana's HTTP API that a push needs.

On the standard library: the client package for this API replaces urllib3 in the same environment, and the
clients of the store and of the exporter need that one.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 30.0
OLDEST_MAJOR = 11
"""Dashboards are made for the schema of this version."""


class PushError(ValueError):
    """A push cannot go on; the message names what, where and the fix."""


def spoken(error: Exception) -> object:
    """Why nobody answered, for a message; what is not HTTP is not repeated, for it may be binary."""
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return "what answers speaks no HTTP"
    return getattr(error, "reason", error)


class GrafanaApi:
    """One Grafana, one token."""

    def __init__(self, url: str, token: str) -> None:
        """Check the address.

        Raises:
            PushError: it is no http address.
        """
        if not url.startswith(("http://", "https://")):
            raise PushError(f"--grafana-url {url}: an address as in http://localhost:3000 expected")
        self.url = url.rstrip("/")
        self._token = token

    def check(self) -> None:
        """Grafana answers, is new enough, and takes the token.

        Raises:
            PushError: it does not.
        """
        version = str((self._call("GET", "/api/health") or {}).get("version", ""))
        major = version.partition(".")[0]
        if not major.isdigit():
            raise PushError(f"{self.url} does not answer as Grafana does: check --grafana-url")
        if int(major) < OLDEST_MAJOR:
            raise PushError(f"Grafana {version} at {self.url} is too old: {OLDEST_MAJOR} or newer is needed")
        self._call("GET", "/api/org")

    def datasources(self) -> list[dict[str, Any]]:
        """All data sources that the token may see."""
        found: list[dict[str, Any]] = self._call("GET", "/api/datasources") or []
        return found

    def create_datasource(self, body: dict[str, Any]) -> None:
        """Add one."""
        self._call("POST", "/api/datasources", body)

    def update_datasource(self, uid: str, body: dict[str, Any]) -> None:
        """Replace one."""
        self._call("PUT", f"/api/datasources/uid/{uid}", body)

    def folder(self, uid: str) -> dict[str, Any] | None:
        """A folder, or None."""
        found: dict[str, Any] | None = self._call("GET", f"/api/folders/{uid}")
        return found

    def create_folder(self, uid: str, title: str) -> None:
        """Make a folder."""
        self._call("POST", "/api/folders", {"uid": uid, "title": title})

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        """{dashboard, meta}, or None."""
        found: dict[str, Any] | None = self._call("GET", f"/api/dashboards/uid/{uid}")
        return found

    def save_dashboard(self, dashboard: dict[str, Any], folder_uid: str) -> None:
        """Create or replace a dashboard by its uid."""
        body = {
            "dashboard": {**dashboard, "id": None},
            "folderUid": folder_uid,
            "message": "moetrace dashboards push",
            "overwrite": True,
        }
        self._call("POST", "/api/dashboards/db", body)

    def alert_rule(self, uid: str) -> dict[str, Any] | None:
        """An alert rule, or None."""
        found: dict[str, Any] | None = self._call("GET", f"/api/v1/provisioning/alert-rules/{uid}")
        return found

    def create_alert_rule(self, body: dict[str, Any]) -> None:
        """Add one."""
        self._call("POST", "/api/v1/provisioning/alert-rules", body)

    def update_alert_rule(self, body: dict[str, Any]) -> None:
        """Replace one by its uid."""
        self._call("PUT", f"/api/v1/provisioning/alert-rules/{body['uid']}", body)

    def annotations(self, tags: list[str]) -> list[dict[str, Any]]:
        """Annotations that have all these tags."""
        query = urllib.parse.urlencode([("tags", tag) for tag in tags] + [("limit", "5000")])
        found: list[dict[str, Any]] = self._call("GET", f"/api/annotations?{query}") or []
        return found

    def create_annotation(self, time_ms: int, text: str, tags: list[str]) -> None:
        """Add one for all dashboards."""
        self._call("POST", "/api/annotations", {"time": time_ms, "text": text, "tags": tags})

    def update_annotation(self, annotation: int, text: str) -> None:
        """Give one another text."""
        self._call("PATCH", f"/api/annotations/{annotation}", {"text": text})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded answer; None for 404 of a GET."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
                "Accept": "application/json",
                # Else nobody could silence or edit a pushed alert rule in Grafana.
                "X-Disable-Provenance": "true",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404 and method == "GET":
                    return None
                raise PushError(self._explain(method, path, error)) from error
        except json.JSONDecodeError as error:
            raise PushError(f"{self.url} does not answer as Grafana does: check --grafana-url") from error
        except (OSError, http.client.HTTPException) as error:
            reason = spoken(error)
            raise PushError(f"no Grafana answers at {self.url} ({reason}): check --grafana-url") from error

    def _explain(self, method: str, path: str, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} refuses the token: make a service account token and give it with --token"
        if error.code == 403:
            return f"the token may not {method} {path}: its service account needs the role Admin"
        try:
            said = str(json.load(error).get("message", ""))
        except (ValueError, AttributeError):
            said = ""
        return f"{self.url}: {method} {path}: {error.code} {said or error.reason}"
