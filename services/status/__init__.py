"""`rollmesh status`: the state of a run, from Redis and the services' own probes."""
