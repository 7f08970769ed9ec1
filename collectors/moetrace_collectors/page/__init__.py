"""The collector's own page, for people without Grafana: `/ui/` and its JSON. See README.md."""
