"""Settings of hot spots per forward mode and signal, from one TOML file over the defaults in this package."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.hot_spot import HotSpotSettings, Signal
from moetrace_schemas.enums import ForwardMode

DEFAULTS_NAME = "hot_spot_settings.toml"
_FIELDS = {field.name for field in dataclasses.fields(HotSpotSettings)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HotSpotRules:
    """Settings by forward mode and signal; None is a recording that tells no forward mode."""

    by_place: Mapping[tuple[ForwardMode | None, Signal], HotSpotSettings]

    def settings(self, forward_mode: ForwardMode | None, signal: Signal) -> HotSpotSettings:
        """Settings of one forward mode and signal."""
        return self.by_place[forward_mode, signal]


def load_rules(path: Path | None = None) -> HotSpotRules:
    """The defaults, with what a file names replaced.

    Raises:
        UsageError: the file cannot be read, names something unknown, or sets a value out of range.
    """
    text = resources.files(__package__).joinpath(DEFAULTS_NAME).read_text(encoding="utf-8")
    tables = [(DEFAULTS_NAME, tomllib.loads(text))]
    if path is not None:
        try:
            tables.append((str(path), tomllib.loads(path.read_text(encoding="utf-8"))))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from error
    for name, table in tables:
        _check_names(name, table)
    origin = str(path) if path is not None else DEFAULTS_NAME
    return HotSpotRules(
        by_place={
            (mode, signal): _settings(origin, [table for _, table in tables], mode, signal)
            for mode in (None, *ForwardMode)
            for signal in Signal
        }
    )


def _settings(
    origin: str, tables: list[dict[str, object]], mode: ForwardMode | None, signal: Signal
) -> HotSpotSettings:
    """Least specific first: every file's [default], then its [mode], then its [mode.signal]."""
    values: dict[str, object] = {}
    for section in ("default", mode):
        for table in tables:
            named = table.get(section, {}) if section is not None else {}
            assert isinstance(named, dict)  # _check_names
            values.update({name: value for name, value in named.items() if name in _FIELDS})
    for section in ("default", mode):
        for table in tables:
            named = table.get(section, {}) if section is not None else {}
            assert isinstance(named, dict)
            values.update(named.get(signal, {}))
    try:
        # Checked field by field in __post_init__, which mypy cannot see through a mapping.
        return HotSpotSettings(**values)  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error


def _check_names(origin: str, table: Mapping[str, object]) -> None:
    sections = ("default", *ForwardMode)
    for section, named in table.items():
        if section not in sections or not isinstance(named, dict):
            raise UsageError(
                f"{origin}: unknown option {section}; tables known are {', '.join(sections)}, "
                f"with {', '.join(sorted(_FIELDS))}"
            )
        for name, value in named.items():
            if name in set(Signal) and isinstance(value, dict):
                unknown = sorted(set(value) - _FIELDS)
            else:
                unknown = [] if name in _FIELDS else [name]
            if unknown:
                raise UsageError(
                    f"{origin}: unknown option {section}.{unknown[0]}; known are "
                    f"{', '.join(sorted(_FIELDS))}, and tables {', '.join(Signal)}"
                )
