"""Reward functions that come with rollmesh (`verifier = "math"` of a component). Each runs in the sandbox, as any function.

Every module has `judge`, whose parameters are `answer`, what it needs of the sample's metadata, and options with defaults.
It gives 1 for a right answer and 0 for a wrong one, and raises where it cannot tell: a task without a readable solution is
a failure of the reward, never an answer that is wrong.
"""
