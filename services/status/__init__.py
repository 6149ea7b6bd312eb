"""`rollmesh status`: one look at a run, from Redis and the services' own probes."""
