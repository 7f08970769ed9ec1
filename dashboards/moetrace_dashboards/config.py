"""Thresholds, names and fixed ids: the one place to change what a site wants otherwise.

Defaults are here; `python -m moetrace_dashboards.build --config FILE.toml --out DIR` overrides any of them.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PROMETHEUS_TYPE = "prometheus"
CLICKHOUSE_TYPE = "grafana-clickhouse-datasource"
SCRAPE_INTERVAL = "15s"
"""What Grafana is told is the shortest interval worth asking for."""
FOLDER_UID = "moetrace"
FOLDER_TITLE = "moetrace"
UIDS = {
    "step_overview": "moetrace-steps",
    "critical_path": "moetrace-critical-path",
    "expert_load": "moetrace-expert-load",
    "all_to_all": "moetrace-all-to-all",
    "placement": "moetrace-placement",
    "collector_health": "moetrace-health",
}
"""Written down, not derived from titles or file names: links and bookmarks outlive a renaming."""


DURATION = re.compile(r"(?=\d)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
"""As Prometheus reads them."""
DURATIONS = frozenset({"persistent_for", "dead_expert_window", "placement_watch", "rebalance_window"})
RATIOS = frozenset(
    {
        "critical_share_high", "critical_share_low", "device_share_high", "device_share_low",
        "all_to_all_decode_share", "cross_node_ratio", "dropped_ratio", "coverage_ratio",
    }
)  # fmt: skip


class ConfigError(ValueError):
    """A configuration file has a mistake; the message names field, value and fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a site may override. Ratios are 0 to 1, durations are Prometheus durations."""

    runbook_base_url: str = "dashboards/runbooks"
    """Alerts link to <runbook_base_url>/<AlertName>.md."""
    trace_datasource_type: str = "tempo"
    """tempo or jaeger: where a step's trace id leads."""
    persistent_for: str = "15m"
    """How long a value must hold; windows are 5 minutes, so this is three of them."""
    expert_load_high: float = 3.0
    """max / mean of one expert over a window."""
    expert_load_low: float = 2.5
    """Where a firing alert goes quiet again; below expert_load_high."""
    imbalance_high: float = 4.0
    """max / mean per step, averaged over a window; single steps are noisier than windows."""
    imbalance_low: float = 3.0
    critical_share_high: float = 0.5
    """Share of a run's steps that clearly name the same rank and phase."""
    critical_share_low: float = 0.35
    device_share_high: float = 0.3
    """Share of a run's steps that name a rank with cause device."""
    device_share_low: float = 0.2
    all_to_all_p99_budget_s: float = 0.005
    """Transfer of one all-to-all; the wait for slow ranks is not in it."""
    all_to_all_decode_share: float = 0.4
    transfer_regression_ratio: float = 1.5
    """Mean transfer now over the mean of the hour before."""
    cross_node_ratio: float = 0.25
    dropped_ratio: float = 0.001
    """Dropped or invalid pairs over all pairs."""
    dead_expert_window: str = "1h"
    placement_watch: str = "1h"
    """How long after a change its effect is compared with what was before."""
    placement_p95_regression: float = 0.10
    placement_error_regression: float = 0.02
    placement_changes_per_hour: float = 6
    rebalance_window: str = "2h"
    """A balancer that is on should have moved something in this time while load is uneven."""
    rebalance_imbalance: float = 1.5
    """max / mean of rows per rank."""
    coverage_ratio: float = 0.95
    """Wrapped call sites that fired over those that were wrapped."""
    verdict_latency_p99_s: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                is_nothing = field.name != "persistent_for" and not value.strip("0ywdhms")
                if field.name in DURATIONS and (is_nothing or not DURATION.fullmatch(value)):
                    raise ConfigError(f"{field.name} = {value!r}: a duration as in 15m or 1h30m expected")
            elif not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} = {value}: a number of 0 or more expected")
            elif field.name in RATIOS and value > 1:
                raise ConfigError(f"{field.name} = {value}: 0 to 1 expected")
        for high, low in (
            ("expert_load_high", "expert_load_low"),
            ("imbalance_high", "imbalance_low"),
            ("critical_share_high", "critical_share_low"),
            ("device_share_high", "device_share_low"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(f"{low} = {getattr(self, low)}: at most {high} = {getattr(self, high)}")
        if self.trace_datasource_type not in ("tempo", "jaeger"):
            raise ConfigError(
                f"trace_datasource_type = {self.trace_datasource_type!r}: tempo or jaeger expected"
            )


def load(path: Path) -> Config:
    """The defaults with what a TOML file says.

    Raises:
        ConfigError: the file cannot be read, or has an unknown field or a wrong value.
    """
    try:
        given: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    known = {field.name: str(field.type) for field in fields(Config)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{path}: {name} is unknown: one of {', '.join(sorted(known))} expected")
        kinds = (int, float) if known[name] == "float" else (str,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"{path}: {name} = {value!r}: {known[name]} expected")
    return Config(**given)
