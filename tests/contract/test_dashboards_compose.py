"""examples/compose and the provisioning files: what they name exists, and their readers accept them."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetrace_collectors.commands import collect
from moetrace_dashboards.config import CLICKHOUSE_TYPE, FOLDER_UID, PROMETHEUS_TYPE

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "examples" / "compose"
PROVISIONING = ROOT / "dashboards" / "provisioning"


def document(path: Path) -> dict[str, Any]:
    """A YAML file."""
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


SERVICES: dict[str, dict[str, Any]] = document(COMPOSE / "compose.yaml")["services"]


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    """Docker would make an empty folder of a path that does not exist."""
    declared = set(document(COMPOSE / "compose.yaml")["volumes"])
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in declared or (COMPOSE / source).exists(), source
    build = SERVICES["collector"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


def test_ports_are_published_on_loopback_only() -> None:
    """The collector has no tokens, and the passwords are placeholders."""
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_collector_knows_its_options() -> None:
    """The command is one that `moetrace collect` takes."""
    command = SERVICES["collector"]["command"]
    assert command[0] == "collect"
    parser = argparse.ArgumentParser(exit_on_error=False)
    collect.add_arguments(parser)
    parsed, unknown = parser.parse_known_args(command[1:])
    assert unknown == []
    assert parsed.dsn == "clickhouse://moetrace:moetrace@clickhouse:8123"


def test_grafana_gets_the_variables_that_provisioning_uses() -> None:
    """Every $NAME of a provisioning file is set, and the dashboards are where the provider looks."""
    used = {
        name for path in PROVISIONING.rglob("*.yaml") for name in re.findall(r"\$([A-Z_]+)", path.read_text())
    }
    assert used <= set(SERVICES["grafana"]["environment"])
    provider = document(PROVISIONING / "dashboards" / "moetrace.yaml")["providers"][0]
    assert provider["folderUid"] == FOLDER_UID
    mounted = {volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted
    sources = document(PROVISIONING / "datasources" / "moetrace.yaml")["datasources"]
    assert [source["type"] for source in sources] == [PROMETHEUS_TYPE, CLICKHOUSE_TYPE, "alertmanager"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """`promtool check config` with the rules where the container has them."""
    text = (COMPOSE / "prometheus.yaml").read_text()
    path = tmp_path / "prometheus.yaml"
    path.write_text(text.replace("/etc/prometheus/moetrace", str(ROOT / "dashboards/generated/prometheus")))
    done = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2


@pytest.mark.skipif(shutil.which("amtool") is None, reason="needs amtool (prometheus-alertmanager)")
def test_alertmanager_accepts_its_configuration() -> None:
    """`amtool check-config` finds nothing wrong."""
    done = subprocess.run(
        ["amtool", "check-config", str(COMPOSE / "alertmanager.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
