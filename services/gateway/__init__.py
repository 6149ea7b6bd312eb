"""The gateway: one address in front of many rollout servers. It holds no session; any number of gateways may run."""
