"""Our few panel shapes over grafana-foundation-sdk.

Every shape takes a description and a unit, so that no panel can be without. Colour scales are sequential and
safe for the colour-blind.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from moetrace_dashboards.config import CLICKHOUSE_TYPE, PROMETHEUS_TYPE
from moetrace_dashboards.queries.base import PromQuery, Query, SqlQuery

PROMETHEUS = dashboard.DataSourceRef(type_val=PROMETHEUS_TYPE, uid="${prometheus}")
CLICKHOUSE = dashboard.DataSourceRef(type_val=CLICKHOUSE_TYPE, uid="${clickhouse}")
GRID_WIDTH = 24
HEIGHT = 8
_SQL_TABLE_FORMAT = 1

AnyPanel = timeseries.Panel | heatmap.Panel | stat.Panel | table.Panel
Link = Builder[dashboard.DashboardLink]


class _SqlTarget(variants.Dataquery):
    """A target of Grafana's ClickHouse data source, which the SDK does not know."""

    def __init__(self, query: SqlQuery, ref_id: str) -> None:
        self._query = query
        self._ref_id = ref_id

    def to_json(self) -> dict[str, object]:
        """The target as the plugin reads it."""
        return {
            "datasource": CLICKHOUSE,
            "editorType": "sql",
            "format": _SQL_TABLE_FORMAT,
            "queryType": "table",
            "rawSql": self._query.sql,
            "refId": self._ref_id,
        }


class _SqlTargetBuilder(Builder[variants.Dataquery]):
    def __init__(self, query: SqlQuery, ref_id: str) -> None:
        self._target = _SqlTarget(query, ref_id)

    def build(self) -> variants.Dataquery:
        """See Builder."""
        return self._target


def _target(query: Query, index: int) -> Builder[variants.Dataquery]:
    ref_id = chr(ord("A") + index)
    if isinstance(query, SqlQuery):
        return _SqlTargetBuilder(query, ref_id)
    target = (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(ref_id)
        .datasource(PROMETHEUS)
        .editor_mode(prometheus_models.QueryEditorMode.CODE)
    )
    if query.instant:
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return target.range()


def _source(query: Query) -> dashboard.DataSourceRef:
    return CLICKHOUSE if isinstance(query, SqlQuery) else PROMETHEUS


def _steps(limit: float | None) -> Builder[dashboard.ThresholdsConfig]:
    steps = [dashboard.Threshold(value=None, color="blue")]
    if limit is not None:
        steps.append(dashboard.Threshold(value=limit, color="orange"))
    return dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 12,
    limit: float | None = None,
    stacked: bool = False,
    links: Sequence[Link] = (),
) -> timeseries.Panel:
    """Values over time; `limit` draws the threshold that the matching alert uses."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(_source(queries[0]))
        .span(width)
        .height(HEIGHT)
        .min(0)
        .color_scheme(
            dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
        )
        .thresholds(_steps(limit))
        .show_points(common.VisibilityMode.AUTO)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if limit is not None:
        panel = panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    if stacked:
        panel = panel.fill_opacity(70).stacking(
            common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
        )
    if isinstance(queries[0], SqlQuery):
        # A table of (time, name, value) becomes one series per name.
        panel = panel.transformations(
            [dashboard.DataTransformerConfig(id_val="prepareTimeSeries", options={"format": "multi"})]
        )
    return panel.links(list(links)).targets([_target(query, i) for i, query in enumerate(queries)])


def heat_over_time(
    title: str, description: str, unit: str, query: PromQuery, *, width: int = 24, links: Sequence[Link] = ()
) -> heatmap.Panel:
    """One row per series, time to the right, colour for the value."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(PROMETHEUS)
        .span(width)
        .height(HEIGHT)
        .thresholds(_steps(None))
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Viridis")
            .scale(heatmap_models.HeatmapColorScale.LINEAR)
            .exponent(0.5)
            .fill("dark-blue")
            .steps(64)
            .reverse(False)
        )
        .cell_values(heatmap.CellValues().unit(unit))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common.HeatmapCellLayout.AUTO))
        .y_axis(heatmap.YAxisConfig())
        .mode(common.TooltipDisplayMode.SINGLE)
        .show_legend()
        .links(list(links))
        .targets([_target(query, 0)])
    )


def matrix(
    title: str,
    description: str,
    unit: str,
    query: SqlQuery,
    *,
    row: str,
    column: str,
    value: str,
    width: int = 12,
    repeat: str = "",
) -> table.Panel:
    """Rows x columns with the value as colour, as of the time shown."""
    panel = (
        _table(title, description, unit, query, width)
        .color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.CONTINUOUS_BL_YL_RD))
        .cell_options(_coloured())
        .transformations(
            [
                dashboard.DataTransformerConfig(
                    id_val="groupingToMatrix",
                    options={"rowField": row, "columnField": column, "valueField": value},
                )
            ]
        )
    )
    return panel.repeat(repeat).max_per_row(2) if repeat else panel


def rows(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    width: int = 24,
    cell_links: Sequence[Link] = (),
) -> table.Panel:
    """A table. Its numbers share the unit: Grafana's schema has no place for a unit per column.

    So a query gives what has another unit as text. `cell_links` lead from any cell of a row elsewhere.
    """
    panel = _table(title, description, unit, query, width)
    return panel.data_links(list(cell_links)) if cell_links else panel


def number(
    title: str, description: str, unit: str, query: PromQuery, *, width: int = 6, limit: float | None = None
) -> stat.Panel:
    """The latest value, large."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(PROMETHEUS)
        .span(width)
        .height(HEIGHT)
        .thresholds(_steps(limit))
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .targets([_target(query, 0)])
    )


def _table(title: str, description: str, unit: str, query: Query, width: int) -> table.Panel:
    return (
        table.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(_source(query))
        .span(width)
        .height(HEIGHT)
        .thresholds(_steps(None))
        .targets([_target(query, 0)])
    )


def _coloured() -> common.TableColoredBackgroundCellOptions:
    return common.TableColoredBackgroundCellOptions(mode=common.TableCellBackgroundDisplayMode.GRADIENT)
