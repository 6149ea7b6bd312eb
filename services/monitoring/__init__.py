"""Alert rules and dashboards, made from the names in `services.metric_catalog`."""
