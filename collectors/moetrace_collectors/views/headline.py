"""The words of a summary: a sentence that names the rank, or says why none is named, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moetrace_collectors.number_format import count, duration_text, percent
from moetrace_collectors.views.findings import Incomparable, Place, Unjudged
from moetrace_schemas.enums import Cause, Evidence, Phase

_ADVICE = {
    Cause.ROUTING: (
        "More rows than the mean explain the excess of {ranks}. See which experts are hot on the layer x "
        "expert heat map, by cohort; then weigh replicas of the hot experts, or the router's balance."
    ),
    Cause.PLACEMENT: (
        "More load than the mean lies with {ranks} while experts are even, or hot experts sit together "
        "there. See the layer x rank heat map; then weigh moving experts."
    ),
    Cause.LINK: (
        "Transfers with {ranks} are slow in themselves. Check link, adapter and congestion counters there, "
        "and the traffic from rank to rank."
    ),
    Cause.DEVICE: (
        "Rows do not explain the time of {ranks}. Check clocks, power cap, temperature and other processes "
        "of the device; swap devices to confirm."
    ),
    Cause.OUTSIDE: (
        "The time of {ranks} is lost between MoE layers. Profile attention, data loading and host work there."
    ),
    Cause.HOST: (
        "Launches come late at {ranks}. Look for host work around the exchange: allocation, garbage "
        "collection, logging, an oversubscribed core."
    ),
    Cause.UNKNOWN: (
        "The evidence does not tell the cause at {ranks}. Record more steps (sample 1/1), with expert "
        "counts, to tell load from device."
    ),
}

MAX_IN_HEADLINE = 3
"""Missing ranks that are named in a headline ..."""
MAX_LISTED = 8
"""... and in an advice; of the others their number, and the least steps they are missing from."""

_INCOMPARABLE = {
    Incomparable.ONE_RANK: (
        "No rank can be compared with another: the run has one rank, and recording more cannot change that.",
        "Recording more steps of one rank cannot name a slow one. See by phase where its time goes, or "
        "record a run of two or more ranks.",
    ),
    Incomparable.NO_EXCHANGE: (
        "No rank can be compared with another: no step has an exchange between ranks, and recording more "
        "cannot change that.",
        "Recording more steps without exchanges cannot name a slow rank. See by phase where the time goes, "
        "or check that the model's dispatch and combine between ranks are traced and that ranks tell their "
        "expert-parallel group (moetrace.init(ep_rank=, ep_size=, ep_group=)).",
    ),
    Incomparable.NO_GROUP: (
        "No rank can be compared with another: there are exchanges, but ranks say that they have no "
        "expert-parallel group.",
        "Say the group: moetrace.init(ep_rank=, ep_size=, ep_group=). It is learned only from an exchange of "
        "torch.distributed in a wrapped dispatch or combine that runs uncompiled.",
    ),
}
"""Headline and advice."""


def write_headline(
    outstanding: Sequence[Place],
    places: Sequence[Place],
    evidence: Mapping[Evidence, int],
    counted: int,
    incomparable: Incomparable | None,
    *,
    missing: Mapping[int, int],
    unjudged: Unjudged | None,
) -> str:
    """One sentence, and before it one of ranks that are missing.

    Args:
        outstanding: What stands out, costliest first.
        places: Every (rank, phase) that was named at all.
        evidence: Counted steps by evidence.
        counted: Counted steps.
        incomparable: Why no step can name a rank, if none can.
        missing: Ranks worth a word (see `summarise`), with the counted steps they are missing from.
        unjudged: Why most steps have no verdict, if that is so.
    """
    if not counted:
        return "No step outside warm-up has been joined."
    said = _write_standing(outstanding, places, evidence, counted, incomparable, unjudged)
    return f"{_missing(missing, counted)} {said}" if missing else said


def _missing(missing: Mapping[int, int], counted: int) -> str:
    most = _most_missing(missing)
    parts = [
        f"rank {rank} missing from {steps:,} of {count(counted, 'step')}"
        for rank, steps in most[:MAX_IN_HEADLINE]
    ]
    others = [steps for _, steps in most[MAX_IN_HEADLINE:]]
    if others:
        each = "all of them" if others[-1] == counted else f"{others[-1]:,} or more"
        parts.append(f"{count(len(others), 'more rank')} missing from {each}")
    said = ", ".join(parts)
    return f"{said[:1].upper()}{said[1:]}."


def _most_missing(missing: Mapping[int, int]) -> list[tuple[int, int]]:
    return sorted(missing.items(), key=lambda item: (-item[1], item[0]))


def _missing_advice(missing: Mapping[int, int]) -> str:
    most = _most_missing(missing)
    ranks = sorted(rank for rank, _ in most[:MAX_LISTED])
    others = [steps for _, steps in most[MAX_LISTED:]]
    if others:
        listed = ", ".join(map(str, ranks))
        whom = f"Ranks {listed} and {len(others):,} more (missing from {count(others[-1], 'step')} or more)"
    else:
        whom = _ranks(ranks).capitalize()
    return (
        f"{whom}: see whether the process still runs, whether it called moetrace.init with this run id, and "
        "whether it reaches the collector; what a missing rank costs cannot be told."
    )


def _write_standing(
    outstanding: Sequence[Place],
    places: Sequence[Place],
    evidence: Mapping[Evidence, int],
    counted: int,
    incomparable: Incomparable | None,
    unjudged: Unjudged | None,
) -> str:
    if incomparable is not None:
        return _INCOMPARABLE[incomparable][0]
    if not outstanding and unjudged is not None:
        return f"No rank can be named in {unjudged.steps:,} of {count(counted, 'step')}: {unjudged.reason}"
    if not outstanding:
        return f"No rank stands out: {_evidence_mix(places, evidence, counted)}."
    first = outstanding[0]
    return (
        f"Rank {first.rank} in {first.phase} ({place_in_layers(first.layer)}) extended "
        f"{percent(first.steps_share)} of steps by a median {duration_text(first.worth_median_ns)}; "
        f"cause: {_causes(first)}; evidence {_evidence(first)}."
    )


def write_remark(outstanding: Sequence[Place], recurring: Sequence[Place], places: Sequence[Place]) -> str:
    """What else was named; empty where nothing was.

    Args:
        outstanding: What stands out, costliest first.
        recurring: What is named often, though not surely; most steps first.
        places: Every (rank, phase) that was named at all, most steps first.
    """
    if outstanding:
        others = [_short(place) for place in outstanding[1:]]
        return f"Also {'; '.join(others)}." if others else ""
    named = recurring or places[:1]
    return f"Named most often: {'; '.join(_short(place) for place in named)}." if named else ""


def write_phase_times(phase_ns: Mapping[Phase, int]) -> str:
    """Where the time goes, longest first; empty where no phase took any."""
    longest = sorted(phase_ns.items(), key=lambda item: -item[1])
    parts = [f"{phase} {duration_text(duration)}" for phase, duration in longest if duration]
    return f"Median time by phase: {', '.join(parts)}." if parts else ""


def advise(
    outstanding: Sequence[Place],
    recurring: Sequence[Place],
    counted: int,
    partial_steps: int,
    incomparable: Incomparable | None,
    *,
    missing: Mapping[int, int],
    unjudged: Unjudged | None,
) -> tuple[str, ...]:
    """What would be worth doing next, one or two sentences each."""
    ranks_by_cause: dict[Cause, list[int]] = {}
    for place in outstanding:
        ranks = ranks_by_cause.setdefault(place.causes[0][0], [])
        if place.rank not in ranks:
            ranks.append(place.rank)
    advice = [_ADVICE[cause].format(ranks=_ranks(ranks)) for cause, ranks in ranks_by_cause.items()]
    if incomparable is not None:
        advice.append(_INCOMPARABLE[incomparable][1])
    elif recurring:
        advice += [_doubtful_advice(place) for place in recurring]
    elif counted and not outstanding and unjudged is None:
        advice.append(
            "Nothing here is sure enough to act on. If steps feel slow all the same, record more of them and "
            "see which phases the critical path is made of."
        )
    advice += [
        f"Less than half of the steps that name rank {place.rank} in {place.phase} are clear: record more "
        "of them before acting."
        for place in outstanding
        if place.clear_steps * 2 < place.steps
    ]
    if missing:
        advice.append(_missing_advice(missing))
    elif partial_steps:
        advice.append("Ranks are missing from some steps: see the accounting before trusting those.")
    return tuple(advice)


def place_in_layers(layer: int | None) -> str:
    """Where in a rank's layers the time lies: a layer is named that holds half of it or more."""
    return f"mostly {layer_name(layer)}" if layer is not None and layer >= 0 else layer_name(layer)


def layer_name(layer: int | None) -> str:
    """A layer for people."""
    if layer is None:
        return "no single layer"
    return f"layer {layer}" if layer >= 0 else "step level"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _doubtful_advice(place: Place) -> str:
    surely = f"surely only in {place.clear_steps} of {place.steps}" if place.clear_steps else "never surely"
    advice = _ADVICE[place.causes[0][0]].format(ranks=_ranks([place.rank]))
    return (
        f"Rank {place.rank} in {place.phase} is named in {percent(place.steps_share)} of steps, {surely}: "
        f"{advice[:1].lower()}{advice[1:]}"
    )


def _evidence_mix(places: Sequence[Place], evidence: Mapping[Evidence, int], counted: int) -> str:
    words = {
        Evidence.INSUFFICIENT: "insufficient",
        Evidence.AMBIGUOUS: "ambiguous",
        Evidence.CLEAR: f"clear, but {_why_clear_is_not_enough(places)}",
    }
    parts = [f"{evidence[member]} {word}" for member, word in words.items() if evidence[member]]
    return f"evidence over {count(counted, 'step')} is {', '.join(parts)}"


def _why_clear_is_not_enough(places: Sequence[Place]) -> str:
    clear = [place for place in places if place.clear_steps]
    different = [
        name
        for name, values in (
            ("ranks", {place.rank for place in clear}),
            ("phases", {place.phase for place in clear}),
        )
        if len(values) > 1
    ]
    return f"of different {' and '.join(different)}" if different else "in too few steps"


def _short(place: Place) -> str:
    return (
        f"rank {place.rank} in {place.phase} ({percent(place.steps_share)} of steps, "
        f"median {duration_text(place.worth_median_ns)}, evidence {_evidence(place)})"
    )


def _causes(place: Place) -> str:
    if len(place.causes) == 1:
        return str(place.causes[0][0])
    return ", ".join(f"{cause} in {percent(steps / place.steps)}" for cause, steps in place.causes)


def _evidence(place: Place) -> str:
    if place.clear_steps == place.steps:
        return "clear"
    return f"clear in {place.clear_steps} of {place.steps}" if place.clear_steps else "ambiguous"
