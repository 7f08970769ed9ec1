"""ClickHouse schema: append-only migrations as package data, and their rendering."""
