"""Configuration and the build command: overrides, mistakes, staleness."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetrace_dashboards import build
from moetrace_dashboards.config import Config, ConfigError, load


def test_a_threshold_changes_alert_and_panel_together(tmp_path: Path) -> None:
    """The line in the panel is where the alert begins, also with another value."""
    made = build.files(Config(all_to_all_p99_budget_s=0.0125))
    assert (
        "run_phase_mode:moetrace_exchange_transfer_seconds:p99_5m > 0.0125" in made["prometheus/alerts.yaml"]
    )
    assert '"value": 0.0125' in made["grafana/all_to_all.json"]


def test_two_builds_are_equal() -> None:
    """Nothing generated depends on time, order or chance."""
    assert build.files(Config()) == build.files(Config())


def test_check_tells_missing_changed_and_left_over_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and their names; 0 when all is current."""
    out = ["--out", str(tmp_path)]
    assert build.main(out) == 0
    assert build.main([*out, "--check"]) == 0
    (tmp_path / "grafana" / "placement.json").unlink()
    (tmp_path / "grafana" / "old.json").write_text("{}")
    (tmp_path / "prometheus" / "alerts.yaml").write_text("")
    assert build.main([*out, "--check"]) == 1
    said = capsys.readouterr().err
    assert all(
        name in said for name in ("grafana/placement.json", "grafana/old.json", "prometheus/alerts.yaml")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dead_ratio = 1", "dead_ratio is unknown"),
        ('cross_node_ratio = "much"', "cross_node_ratio = 'much': float expected"),
        ("cross_node_ratio = true", "cross_node_ratio = True: float expected"),
        ("expert_load_low = 9.0", "expert_load_low = 9.0: at most expert_load_high = 3.0"),
        ('trace_datasource_type = "zipkin"', "tempo or jaeger expected"),
        ("= 1", "cannot read"),
        ('persistent_for = "abc"', "persistent_for = 'abc': a duration as in 15m or 1h30m expected"),
        ('dead_expert_window = ""', "a duration as in 15m or 1h30m expected"),
        ('rebalance_window = "0h"', "a duration as in 15m or 1h30m expected"),
        ('placement_watch = "30m1h"', "a duration as in 15m or 1h30m expected"),
        ("all_to_all_p99_budget_s = -1", "all_to_all_p99_budget_s = -1: a number of 0 or more expected"),
        ("dropped_ratio = nan", "dropped_ratio = nan: a number of 0 or more expected"),
        ("imbalance_high = inf", "imbalance_high = inf: a number of 0 or more expected"),
        ("coverage_ratio = 95", "coverage_ratio = 95: 0 to 1 expected"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    """Field, value and what is expected."""
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)
    assert build.main(["--config", str(path), "--out", str(tmp_path)]) == 2
