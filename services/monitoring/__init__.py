"""Alert rules and dashboards, made from the names in `services.observability.catalog`."""
