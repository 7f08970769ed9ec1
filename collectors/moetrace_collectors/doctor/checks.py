"""The judgements of the checklist: rows of a query -> pass, fail or unknown, with figure and fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moetrace_collectors.doctor.finding import Finding, failed, passed, unknown
from moetrace_collectors.doctor.model_config import ModelShape
from moetrace_collectors.number_format import count

Rows = Sequence[Mapping[str, Any]]

MAX_FUSED = 0.2
"""Part of the layers' time that may be in phases that cannot be told apart."""
MAX_LOST = 0.001
"""Part of the pairs that may be dropped or out of range."""
MIN_EXCHANGES = 100
"""Of each kind, for a p99 that means anything."""
MAX_CROSS_NODE = 0.25
"""Part of the rows that may leave their node, as of the alert MoeCrossNodeRatioHigh."""
MAX_RANK_LOAD = 1.2
"""Over the mean of the ranks: hot experts together do no harm where the rank's load is even all the same."""
MIN_EXCHANGE_SHARE = 0.1
"""Below this part of the time, hiding exchanges gains little."""
SILENT_RANK_FIX = (
    "call moetrace.init on every rank; where they did, see whether they still run and reach the collector"
)


def coverage(rows: Rows) -> Finding:
    """Every rank reports, every layer has its phases and counts, and little is fused."""
    row = rows[0]
    layers, ranks, world_size = int(row["layers"]), int(row["ranks"]), int(row["world_size"])
    fused = int(row["fused_ns"]) / max(int(row["layer_ns"]), 1)
    figure = (
        f"{ranks} of {count(world_size, 'rank')}, {count(layers, 'layer')}: {int(row['layers_with_router'])} "
        f"with router, {int(row['layers_with_experts'])} with experts, "
        f"{int(row['layers_with_exchange'])} with exchanges, {int(row['counted_layers'])} counted; "
        f"{fused:.0%} fused"
    )
    fix = "instrument every rank, read what instrument() printed, and wrap what it skipped (moetrace.wrap)"
    if not layers:
        return failed(figure, "no MoE layer is seen", fix)
    if ranks < world_size:
        return failed(figure, f"{count(world_size - ranks, 'rank')} never reported", SILENT_RANK_FIX)
    wanted = {"router": "layers_with_router", "experts": "layers_with_experts", "counts": "counted_layers"}
    if int(row["ep_size"]) > 1:
        wanted["exchanges"] = "layers_with_exchange"
    for what, name in wanted.items():
        if int(row[name]) < layers:
            return failed(figure, f"{count(layers - int(row[name]), 'layer')} without {what}", fix)
    if fused > MAX_FUSED:
        return failed(
            figure,
            f"{fused:.0%} of the layers' time is in phases that cannot be told apart",
            "use a backend of the engine whose router, experts and exchange are calls of their own",
        )
    return passed(figure, "every rank and layer is seen with its phases and counts")


def model_shape(rows: Rows, shape: ModelShape | None) -> Finding:
    """Counts agree with the model's config: top-k, experts, shared experts."""
    row = rows[0] if rows else None
    if row is None or not int(row["pairs_are_multiples_of"]):
        return unknown("no counts", "no expert was counted", "switch counting on and record some steps")
    divisor, experts = int(row["pairs_are_multiples_of"]), int(row["experts"])
    shared_layers = int(row["layers_with_shared_expert"])
    figure = (
        f"{count(experts, 'expert')}; pairs per rank and layer are multiples of {divisor}; "
        f"{count(shared_layers, 'layer')} with a shared expert"
    )
    if shape is None or (shape.top_k is None and shape.experts is None and shape.shared_experts is None):
        return unknown(
            figure,
            "the model's config was not given",
            "give --config config.json, or --top-k, --experts and --shared-experts",
        )
    if shape.experts is not None and shape.experts != experts:
        return failed(
            figure,
            f"the config has {count(shape.experts, 'expert')}, counted are {experts}",
            "counts of physical experts need their placement: announce it, moetrace.placement(version, map)",
        )
    if shape.top_k and divisor % shape.top_k:
        return failed(
            figure,
            f"the config routes a token to {count(shape.top_k, 'expert')}, but pairs are no multiples of it",
            "look for dropped or doubled rows: the router's result is counted before or after something else",
        )
    if shape.shared_experts and not shared_layers:
        return failed(
            figure,
            f"the config has {count(shape.shared_experts, 'shared expert')}, none is seen",
            "wrap the shared expert: moetrace.wrap(shared_expert=...), or use an adapter that knows it",
        )
    if shape.shared_experts == 0 and shared_layers:
        return failed(
            figure, "the config has no shared expert, one is seen", "check that --config is this run's"
        )
    return passed(figure, "counts agree with the model's config")


def drops(rows: Rows) -> Finding:
    """No step is missing where every one is sampled, and hardly any pair is dropped or out of range."""
    row = rows[0]
    routed, dropped, invalid = (int(row[name]) for name in ("routed", "dropped", "invalid"))
    total = routed + dropped + invalid
    figure = f"{dropped:,} dropped and {invalid:,} out of range of {count(total, 'pair')}"
    lost = int(row["lost_rank_steps"] or 0)
    if lost:
        return failed(
            f"{count(lost, 'rank step')} missing, {figure}",
            "every step is sampled, and numbers between a rank's first and last step never came",
            "see moetrace_self_dropped_steps_total of the ranks: more buffers or queue_steps, or a spool_dir "
            "for when the collector is away; numbers that the job itself skips are no loss",
        )
    if not total:
        return unknown("no counts", "no expert was counted", "switch counting on and record some steps")
    if (dropped + invalid) / total > MAX_LOST:
        return failed(
            figure,
            f"{(dropped + invalid) / total:.2%} of the pairs are lost, {MAX_LOST:.1%} may be",
            "raise the capacity factor, or find out who sends ids beyond the experts",
        )
    return passed(figure, "no more than a trace is lost")


def topology(rows: Rows) -> Finding:
    """Every rank's host is known, and groups are alike."""
    row = rows[0]
    ranks, bare, hosts = (int(row[name]) for name in ("ranks", "ranks_without_host", "hosts"))
    figure = (
        f"{count(ranks, 'rank')} on {count(hosts, 'host')}, "
        f"{count(int(row['ep_groups']), 'expert-parallel group')} of {_span(row)}"
    )
    if bare:
        return failed(
            figure,
            f"{count(bare, 'rank')} without a host's name",
            "send host.name as a resource attribute from them",
        )
    if ranks < int(row["world_size"]):
        return failed(
            figure,
            f"{count(int(row['world_size']) - ranks, 'rank')} never seen",
            SILENT_RANK_FIX,
        )
    if int(row["smallest_ep_size"]) != int(row["largest_ep_size"]):
        return failed(
            figure,
            "expert-parallel groups differ in size",
            "pass ep_rank, ep_size and ep_group to moetrace.init on every rank",
        )
    return passed(figure, "hosts and groups of all ranks are known")


def all_to_all(rows: Rows, *, ep_size: int) -> Finding:
    """Transfer times of both exchanges are measured, often enough for a p99."""
    figure = "; ".join(
        f"{row['phase']}: p50 {float(row['p50_ms']):.3g}, p95 {float(row['p95_ms']):.3g}, p99 "
        f"{float(row['p99_ms']):.3g} ms over {int(row['exchanges'])}"
        for row in rows
    )
    if not rows and ep_size <= 1:
        return unknown("no exchange", "the run has no expert parallelism", "nothing, unless it should have")
    if len(rows) < 2:
        return failed(
            figure or "no exchange",
            "dispatch and combine are not both measured",
            "wrap both: moetrace.wrap(dispatch=..., combine=...), or read what instrument() skipped",
        )
    fewest = min(int(row["exchanges"]) for row in rows)
    if fewest < MIN_EXCHANGES:
        return unknown(
            figure,
            f"too few for a p99: {count(fewest, 'exchange')}, {MIN_EXCHANGES} are needed",
            "record more steps",
        )
    return passed(figure, "both exchanges are measured, waits apart")


def cross_node(rows: Rows) -> Finding:
    """Not too many rows leave their node."""
    row = rows[0] if rows else {"total_rows": 0, "cross_rows": 0, "hosts": 0}
    total, crossing = int(row["total_rows"]), int(row["cross_rows"])
    if not total:
        return unknown(
            "no traffic",
            "rows per destination are not recorded",
            "use an adapter that knows the exchange's splits, or announce them (moetrace/adapters/README.md)",
        )
    share = crossing / total
    figure = f"{share:.1%} of {count(total, 'row')} between {count(int(row['hosts']), 'host')}"
    if share > MAX_CROSS_NODE:
        return failed(
            figure,
            f"over {MAX_CROSS_NODE:.0%} of the rows leave their node",
            "limit routing to node groups, or see what moetrace replay --nodes N would gain",
        )
    return passed(figure, f"at most {MAX_CROSS_NODE:.0%} leave their node")


def hot_experts(rows: Rows, *, received: int) -> Finding:
    """No rank is overloaded by two or more hot experts of a layer."""
    if not received:
        return unknown(
            "no received rows",
            "where experts live is not recorded",
            "use an adapter that counts what ranks receive, or announce the placement",
        )
    crowded = [
        row
        for row in rows
        if int(row["hot_experts"]) > 1 and float(row["rank_load_over_mean"]) > MAX_RANK_LOAD
    ]
    figure = f"{count(sum(int(row['hot_experts']) for row in rows), 'hot expert')} (over twice the mean)"
    if crowded:
        worst = crowded[0]
        listed = ", ".join(map(str, worst["experts"]))
        return failed(
            figure,
            f"layer {int(worst['layer'])}: experts {listed} are hot and all on rank {int(worst['rank'])}, "
            f"which has {float(worst['rank_load_over_mean']):.2f} times the mean of the ranks",
            "see what moving or replicating one would gain: moetrace replay --run RUN",
        )
    return passed(figure, "no rank is overloaded by hot experts of one layer")


def overlap(rows: Rows) -> Finding:
    """Exchanges run beside compute, or are too short to matter."""
    row = rows[0]
    exchange, beside, rank = (int(row[name]) for name in ("exchange_ns", "asynchronous_ns", "rank_ns"))
    if not exchange:
        return unknown("no exchange", "no exchange is recorded", "nothing, without expert parallelism")
    share = exchange / max(rank, 1)
    figure = (
        f"exchanges are {share:.0%} of the ranks' time; {beside / exchange:.0%} of it on a stream "
        f"beside compute; {count(int(row['layers_with_shared_expert']), 'layer')} with a shared expert, "
        f"{count(int(row['microbatches']), 'microbatch', 'microbatches')}"
    )
    if beside:
        return passed(figure, "exchanges are launched beside compute")
    if share < MIN_EXCHANGE_SHARE:
        return passed(figure, f"under {MIN_EXCHANGE_SHARE:.0%}: little could be hidden")
    return failed(
        figure,
        "every exchange runs on the compute stream, with nothing beside it",
        "launch exchanges asynchronously: shared expert beside dispatch, or two microbatches in turn",
    )


def forward_modes(rows: Rows) -> Finding:
    """Prefill and decode are never in one step."""
    row = rows[0]
    counts = {name: int(row[name]) for name in ("train", "prefill", "decode", "mixed")}
    figure = ", ".join(f"{steps:,} {name}" for name, steps in counts.items() if steps) or "no step"
    if counts["mixed"]:
        return failed(
            figure,
            f"prefill and decode are together in {count(counts['mixed'], 'step')}",
            "pass forward_mode to moetrace.step, and schedule them apart where the engine can",
        )
    if not int(row["steps"]):
        return unknown(figure, "no step is recorded", "record some steps")
    return passed(figure, "every step is of one kind")


def _span(row: Mapping[str, Any]) -> str:
    smallest, largest = int(row["smallest_ep_size"]), int(row["largest_ep_size"])
    return f"{smallest} to {count(largest, 'rank')}" if smallest != largest else count(largest, "rank")


def rollback(rows: Rows) -> Finding:
    """The placement in force has a target to go back to, whose mapping is known."""
    row = rows[0]
    newest, version, target = (
        int(row[name] or 0) for name in ("newest_version", "version", "rollback_version")
    )
    known = sorted(int(number) for number in row["versions_with_mapping"] or ())
    if not newest and not version:
        return unknown(
            "no placement version",
            "the run names no placement",
            "announce it: moetrace.placement(version, physical_to_logical), also when it never changes",
        )
    figure = f"version {max(newest, version)} in force, rollback target {target or 'none'}"
    fix = "announce every version with its map, and rollback_version with the one to go back to"
    if not target:
        return failed(figure, "nothing is told to go back to", fix)
    if target not in known:
        return failed(figure, f"the mapping of version {target} is not in the ledger", fix)
    return passed(figure, f"the mapping of version {target} is in the ledger")


def alert_rules(groups: Sequence[Mapping[str, Any]] | None, *, problem: str = "") -> Finding:
    """Prometheus has the alert rules loaded, and they evaluate.

    Args:
        groups: `data.groups` of Prometheus' answer; None where it was not asked or did not answer.
        problem: why there is no answer.
    """
    fix = "load dashboards/generated/prometheus/*.yaml (moetrace dashboards), and give --prometheus URL"
    if groups is None:
        return unknown("not asked", problem or "no Prometheus was given", fix)
    rules = [
        rule
        for group in groups
        for rule in group.get("rules", ())
        if str(rule.get("name", "")).startswith("Moe")
    ]
    broken = [str(rule["name"]) for rule in rules if rule.get("health") == "err"]
    figure = f"{count(len(rules), 'alert rule')} of moetrace, {len(broken)} not evaluating"
    if not rules:
        return failed(figure, "none is loaded", fix)
    if broken:
        return failed(
            figure, f"{', '.join(broken[:3])}: evaluation fails", "see Prometheus' page Status / Rules"
        )
    return passed(figure, "loaded and evaluating")
