"""Every PromQL and SQL text; the only place that spells metric and column names.

promql.py: panels. sql.py: panels on ClickHouse. rules.py: recording rules and alert expressions.
"""
