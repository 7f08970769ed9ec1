"""Grafana dashboards, recording and alert rules as code. Reads contracts only."""
