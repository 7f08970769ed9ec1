"""Who records: run, rank and expert-parallel position, from arguments, torch or the launcher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moetrace.context import detect
from moetrace.errors import ConfigError


def test_the_launchers_variables_say_rank_and_run() -> None:
    """The names that torchrun gives are enough."""
    context = detect(run_id="", environment={"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "job-1"})
    assert (context.run_id, context.rank, context.world_size) == ("job-1", 3, 8)
    assert (context.ep_rank, context.ep_size, context.ep_group) == (0, 1, 3)


def test_arguments_beat_the_launcher() -> None:
    """What is said explicitly holds."""
    context = detect(run_id="mine", rank=1, world_size=2, environment={"RANK": "3", "WORLD_SIZE": "8"})
    assert (context.run_id, context.rank, context.world_size) == ("mine", 1, 2)


def test_a_slurm_job_is_a_run() -> None:
    """Where torchrun gave no id of its own (its default is the word none)."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "", "SLURM_JOB_ID": "4711"}
    assert detect(run_id="", environment=environment).run_id == "4711"


def test_torchruns_default_id_is_no_run() -> None:
    """All unnamed jobs of a site would be one run."""
    with pytest.raises(ConfigError, match="ranks cannot agree on one by themselves"):
        detect(run_id="", environment={"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})


def test_an_expert_parallel_group_is_named_by_its_lowest_rank() -> None:
    """Consecutive ranks are assumed until an adapter finds the group in the model."""
    context = detect(run_id="r", rank=6, world_size=8, ep_rank=2, ep_size=4, environment={})
    assert context.ep_group == 4


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    """As Python's own: nothing else has a place in a span or in JSON."""
    said = {"rank": 1, "world_size": 8, "ep_rank": 1, "ep_size": 4, "ep_group": 0}
    context = detect(run_id="r", environment={}, **{name: np.int64(value) for name, value in said.items()})
    for name, value in said.items():
        assert getattr(context, name) == value
        assert type(getattr(context, name)) is int


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"rank": 8, "world_size": 8}, {}, r"rank=8: 0 to 7 expected \(world_size=8\)"),
        ({"ep_rank": 4, "ep_size": 4}, {}, r"ep_rank=4: 0 to 3 expected \(ep_size=4\)"),
        ({"rank": "x"}, {}, "rank='x': a whole number expected"),
        ({"world_size": 1.5}, {}, "world_size=1.5: a whole number expected"),
        ({"ep_size": "2", "ep_rank": 0}, {}, "ep_size='2': a whole number expected"),
        ({"ep_group": "a"}, {}, "ep_group='a': a whole number expected"),
        ({}, {"RANK": "first"}, "RANK='first': a whole number expected"),
    ],
)
def test_a_number_that_does_not_fit_is_named(
    arguments: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    """With its value and what is expected."""
    with pytest.raises(ConfigError, match=message):
        detect(run_id="r", environment=environment, **arguments)
