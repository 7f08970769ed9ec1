"""What all dashboards share: variables, links among each other, annotations, stable ids."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

from moetrace_dashboards.config import CLICKHOUSE_TYPE, PROMETHEUS_TYPE, UIDS, Config
from moetrace_dashboards.panels import PROMETHEUS, AnyPanel, Link
from moetrace_dashboards.queries import promql
from moetrace_schemas.enums import ForwardMode

TAG = "moetrace"


def assemble(
    key: str,
    title: str,
    description: str,
    panels: Sequence[AnyPanel],
    config: Config,
    *,
    with_layer: bool = False,
    with_step: bool = False,
) -> models.Dashboard:
    """A dashboard of these panels; their ids are their places, so that links to a panel stay."""
    board = (
        builders.Dashboard(title)
        .uid(UIDS[key])
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("30s")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("moetrace")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            builders.AnnotationQuery()
            .name("Placement changes")
            .datasource(PROMETHEUS)
            .enable(True)
            .icon_color("purple")
            .expr(promql.PLACEMENT_CHANGES)
        )
    )
    for variable in _variables(config, with_layer=with_layer, with_step=with_step):
        board = board.with_variable(variable)
    for index, panel in enumerate(panels):
        board = board.with_panel(panel.id(index + 1))
    return board.build()


def link_to(key: str, title: str) -> Link:
    """A link that keeps run, mode and time."""
    return (
        builders.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{UIDS[key]}?${{__url_time_range}}&${{run:queryparam}}&${{forward_mode:queryparam}}")
    )


def step_link() -> Link:
    """From a row with a step's number to that step."""
    url = (
        f"/d/{UIDS['critical_path']}?${{__url_time_range}}&${{run:queryparam}}"
        "&var-step=${__data.fields.step}"
    )
    return builders.DashboardLink("this step, rank by rank").type(models.DashboardLinkType.LINK).url(url)


def trace_link(config: Config) -> Link:
    """From a row with a trace id to the trace: one span per rank."""
    # quote() would also hide Grafana's own ${...}, so the pane is quoted around them.
    kind = '"queryType":"traceql",' if config.trace_datasource_type == "tempo" else ""
    head = quote('{"a":{"datasource":"')
    middle = quote(f'","queries":[{{"refId":"A",{kind}"query":"')
    tail = quote('"}],"range":{"from":"now-1h","to":"now"}}}')
    panes = f"{head}${{traces}}{middle}${{__data.fields.trace_id}}{tail}"
    url = f"/explore?schemaVersion=1&panes={panes}"
    return builders.DashboardLink("the trace of this step").type(models.DashboardLinkType.LINK).url(url)


Variable = (
    builders.DatasourceVariable | builders.QueryVariable | builders.CustomVariable | builders.TextBoxVariable
)


def _variables(config: Config, *, with_layer: bool, with_step: bool) -> list[Variable]:
    variables: list[Variable] = [
        builders.DatasourceVariable("prometheus").label("Prometheus").type(PROMETHEUS_TYPE),
        builders.DatasourceVariable("clickhouse").label("ClickHouse").type(CLICKHOUSE_TYPE),
        builders.DatasourceVariable("traces").label("Traces").type(config.trace_datasource_type),
        _query("model_version", "Model version", promql.MODEL_VERSION_VARIABLE)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all")),
        _query("run", "Run", promql.RUN_VARIABLE),
        builders.CustomVariable("forward_mode")
        .label("Forward mode")
        .values(",".join(mode.value for mode in ForwardMode))
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(text=["All"], value=["$__all"])),
    ]
    if with_layer:
        variables.append(
            _query("layer", "Layer", promql.LAYER_VARIABLE)
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(text=["All"], value=["$__all"]))
            .sort(models.VariableSort.NUMERICAL_ASC)
        )
    if with_step:
        variables.append(builders.TextBoxVariable("step").label("Step (empty: the slowest shown)"))
    return variables


def _query(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
