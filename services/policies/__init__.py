"""Pure rules (no clock, socket or tensor library): the live services, the tests and the planner call the same ones."""
