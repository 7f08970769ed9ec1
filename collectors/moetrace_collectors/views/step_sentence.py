"""A step's verdict in words, the same in every view. Pure."""

from __future__ import annotations

from moetrace_collectors.number_format import duration_text, length_text, percent
from moetrace_collectors.views.headline import place_in_layers
from moetrace_collectors.views.run_records import StepRow


def verdict_sentence(row: StepRow) -> str:
    """How long the step took, who extended it, and why the evidence is what it is."""
    sentence = f"{length_text(row.step_ns)}, {row.forward_mode}."
    suspect = row.suspect
    if suspect is not None:
        sentence += (
            f" Rank {suspect.rank} in {suspect.phase} ({place_in_layers(suspect.layer)}) cost "
            f"{duration_text(suspect.worth_ns)}, {percent(suspect.share)} of the step's extension; cause: "
            f"{row.cause}."
        )
    return f"{sentence} {row.reason[:1].upper()}{row.reason[1:]}"


def suspect_sentence(row: StepRow) -> str:
    """Who extended the step, by how much and why; or that no rank can be named."""
    suspect = row.suspect
    if suspect is None:
        return "No rank can be named for this step."
    return (
        f"Rank {suspect.rank} in {suspect.phase} ({place_in_layers(suspect.layer)}) extended this step by "
        f"{duration_text(suspect.worth_ns)}, {percent(suspect.share)} of all that uneven ranks cost it; "
        f"cause: {row.cause}."
    )


def runner_up_sentence(row: StepRow) -> str:
    """Who comes next; empty where nobody does."""
    runner_up = row.runner_up
    if runner_up is None:
        return ""
    return (
        f"Next: rank {runner_up.rank} in {runner_up.phase} ({place_in_layers(runner_up.layer)}), "
        f"{duration_text(runner_up.worth_ns)}."
    )
