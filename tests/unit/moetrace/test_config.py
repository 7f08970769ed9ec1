"""Settings: arguments over environment over defaults, checked once, with messages that say the fix."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from moetrace.config import ENVIRONMENT_PREFIX, Config
from moetrace.errors import ConfigError, MoetraceError
from moetrace_schemas.enums import ForwardMode


def test_an_argument_beats_the_environment_and_that_beats_the_default() -> None:
    """None as an argument is not given."""
    environment = {"MOETRACE_RUN_ID": "from-environment", "MOETRACE_BUFFERS": "3"}
    config = Config.load({"run_id": "from-argument", "buffers": None}, environment)
    assert (config.run_id, config.buffers, config.queue_steps) == ("from-argument", 3, Config().queue_steps)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enabled", "off", False),
        ("enabled", "Yes", True),
        ("run_id", "run.7:a-b_c", "run.7:a-b_c"),
        ("endpoint", "", ""),
        ("sample", "1/100", "1/100"),
        ("forward_mode", "Decode", ForwardMode.DECODE),
        ("cohorts", "code, prose,,", ("code", "prose")),
        ("warmup_steps", "5", 5),
        ("export_timeout_s", "0.5", 0.5),
        ("clock", "host", "host"),
    ],
)
def test_every_kind_of_setting_is_read_from_the_environment(name: str, text: str, value: object) -> None:
    """As people write them in a launcher's script."""
    config = Config.load({}, {ENVIRONMENT_PREFIX + name.upper(): text})
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample": "often"}, "sample='often': 1/N with N of 1 or more expected, or 0 for none"),
        ({"sample": "2/3"}, "sample='2/3': 1/N"),
        ({"sample": "1/0"}, "sample='1/0': 1/N"),
        ({"sample": "1/-5"}, "sample='1/-5': 1/N"),
        ({"sample": "5"}, "sample='5': 1/N"),
        ({"sample": 7}, "sample='7': 1/N"),
        ({"run_id": "a b"}, "run_id='a b': 1 to 128 characters of A-Z a-z 0-9"),
        ({"run_id": "x" * 129}, "1 to 128 characters"),
        ({"run_id": "ok\n"}, "1 to 128 characters"),
        ({"endpoint": "collector:4318"}, "endpoint='collector:4318': a URL like http://127.0.0.1:4318"),
        ({"endpoint": "ftp://x"}, "endpoint='ftp://x': a URL like"),
        ({"headers": "a=b,t0k3n"}, "headers: entry 2 is not name=value; name=value,name=value expected"),
        ({"clock": "gpu"}, "clock='gpu': one of auto, host, cuda, device expected"),
        ({"buffers": 0}, "buffers=0: 1 or more expected"),
        ({"buffers": True}, "buffers=True: int expected"),
        ({"buffers": "8"}, "buffers='8': int expected"),
        ({"max_intervals": 15}, "max_intervals=15: 16 or more expected"),
        ({"max_intervals": 40_000}, "max_intervals=40000: 32767 or less expected"),
        ({"queue_steps": 0}, "queue_steps=0: 1 or more expected"),
        ({"warmup_steps": -1}, "warmup_steps=-1: 0 or more expected"),
        ({"export_timeout_s": 0}, "export_timeout_s=0.0: seconds between 0 and 3600 expected"),
        ({"shutdown_timeout_s": float("nan")}, "shutdown_timeout_s=nan: seconds between 0 and 3600"),
        ({"forward_mode": "training"}, "forward_mode='training': one of train, prefill, decode, mixed"),
        ({"cohorts": "code"}, "cohorts='code': a sequence of strings expected"),
        ({"cohorts": 5}, "cohorts=5: a sequence of strings expected"),
        ({"cohorts": ["a", 1]}, r"cohorts=\['a', 1\]: a sequence of strings expected"),
        ({"enabled": "yes"}, "enabled='yes': bool expected"),
        ({"smaple": "1/2"}, "smaple: no such setting; known: backward, buffers, ca_file,"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_expected(
    arguments: dict[str, Any], message: str
) -> None:
    """It is a ConfigError, which is a ValueError, before anything has started."""
    with pytest.raises(ConfigError, match=message) as caught:
        Config.load(arguments, {})
    assert isinstance(caught.value, ValueError | MoetraceError)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ENABLED", "maybe", "MOETRACE_ENABLED='maybe': true or false expected"),
        ("BUFFERS", "many", "MOETRACE_BUFFERS='many': int expected"),
        ("FORWARD_MODE", "eval", "MOETRACE_FORWARD_MODE='eval': one of train, prefill, decode, mixed"),
        ("EXPORT_TIMEOUT_S", "soon", "MOETRACE_EXPORT_TIMEOUT_S='soon': float expected"),
        ("SAMPLE", "x", "sample='x': 1/N"),
    ],
)
def test_a_wrong_variable_is_named_as_it_is_spelled_there(name: str, text: str, message: str) -> None:
    """People look for what they wrote."""
    with pytest.raises(ConfigError, match=message):
        Config.load({}, {ENVIRONMENT_PREFIX + name: text})


@pytest.mark.parametrize(
    ("sample", "period"), [("1/1", 1), ("1", 1), ("0", 0), (" 1/8 ", 8), ("1/1000", 1000)]
)
def test_a_sample_says_one_step_in_how_many(sample: str, period: int) -> None:
    """`0` samples none."""
    assert Config(sample=sample).sample_period == period


def test_headers_are_read_as_a_mapping() -> None:
    """Values may hold `=`, as tokens do."""
    assert Config(headers="authorization=Bearer a=b, x-scope = y").header_map == {
        "authorization": "Bearer a=b",
        "x-scope": "y",
    }


def test_a_token_in_the_headers_shows_nowhere() -> None:
    """Settings are printed and errors are logged; secrets must be in neither."""
    assert "t0k3n" not in repr(Config(headers="authorization=t0k3n"))
    with pytest.raises(ConfigError) as caught:
        Config(headers="t0k3n")
    assert "t0k3n" not in str(caught.value)


def test_every_setting_says_what_it_is() -> None:
    """Fields are the documentation of the settings; none is without a default."""
    assert all(getattr(Config(), field.name) is not None for field in fields(Config))


def test_a_misspelled_variable_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It would be passed over without a word; variables of the collector's commands are not meant."""
    config = Config.load({}, {"MOETRACE_ENPOINT": "http://c:1", "MOETRACE_GRAFANA_TOKEN": "x", "PATH": "y"})
    assert config.endpoint == Config().endpoint
    assert [record.getMessage() for record in caplog.records] == [
        "moetrace: MOETRACE_ENPOINT is no setting and is not used: MOETRACE_ENDPOINT is one"
    ]
