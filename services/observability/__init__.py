"""Logs, metrics and traces of every process; the metric catalogue; alert rules and the Grafana dashboard."""
