"""`moetrace simulate`: the command line around the simulator."""

from __future__ import annotations

import argparse
import json

import pytest

from moetrace_collectors.commands import simulate
from moetrace_collectors.errors import UsageError


def command(*arguments: str) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate.run(parser.parse_args(arguments))


SMALL = ("--ranks", "4", "--layers", "2", "--steps", "30", "--experts", "8", "--noise", "quiet")


def test_an_injected_fault_is_named_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of the last steps and three lines of totals."""
    assert command(*SMALL, "--inject", "cause=device,rank=2,phase=router,extension=0.2,first=10") == 0
    out = capsys.readouterr().out
    assert "faulty steps: 20 of 20 named, 20 clear, 0 left unclear" in out
    assert "clear verdicts that name something else: 0" in out
    assert "rank 2 router (device)" in out


def test_json_holds_every_verdict_and_its_truth(capsys: pytest.CaptureFixture[str]) -> None:
    """One document on stdout, the same for the same seed."""
    inject = ("--inject", "cause=outside,rank=1,extension=0.2,layer=1,every=2", "--json")
    command(*SMALL, *inject)
    first = json.loads(capsys.readouterr().out)
    command(*SMALL, *inject)
    assert json.loads(capsys.readouterr().out) == first
    assert len(first["verdicts"]) == 30
    last = first["verdicts"][28]
    assert last["truth"] == [{"cause": "outside", "rank": 1, "phase": "outside", "layer": 1}]
    assert (last["suspect"]["rank"], last["suspect"]["phase"], last["suspect"]["layer"]) == (1, "outside", 1)
    assert first["summary"]["steps"] == 30


def test_a_link_without_calm_steps_is_left_unclear_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Never a wrong name, and a line that says what is seen and what it may be."""
    assert command("--steps", "40", "--seed", "1", "--inject", "cause=link,rank=2,extension=0.3") == 0
    out = capsys.readouterr().out
    assert "faulty steps: 0 of 40 named, 0 clear, 40 left unclear" in out
    assert "calm steps:" not in out
    assert "a slow link since the first step, or an exchange that costs it always" in out
    assert "clear verdicts that name something else: 0" in out


def test_a_hiccup_of_the_noise_is_no_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A core that was taken away extends the step as well, though nobody injected it."""
    assert command("--seed", "2", "--json") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["clear_hiccup"], summary["clear_wrong"]) == (2, 0)


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        ("cause=device,rank=9,extension=0.1", "ranks are 0 to 3"),
        ("cause=device,rank=0", "extension= is missing"),
        ("cause=device,rank=0,extension=0.1,color=red", "unknown key 'color'"),
        ("cause=magic,rank=0,extension=0.1", "magic"),
        ("cause=device,rank=0,extension=0.1,phase=dispatch", "a device is slow in router, permute"),
        ("cause=device,rank=0,extension=0", "above 0"),
        ("cause=device,rank=0,extension=0.1,every=0", "every is 1 or more"),
        ("cause=unknown,rank=0,extension=0.1", "one of device"),
    ],
)
def test_a_fault_that_cannot_be_injected_is_one_line(inject: str, message: str) -> None:
    """The message names the option, the value and what is possible."""
    with pytest.raises(UsageError, match=message):
        command(*SMALL, "--inject", inject)
