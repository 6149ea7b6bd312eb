"""A step's metrics: the record, the files of a run, and Prometheus's figures."""
