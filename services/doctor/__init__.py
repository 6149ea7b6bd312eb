"""`rollmesh doctor`: what is wrong with this machine, a planned run or a running one.

Facts are collected here; what follows from them is decided in `services.policies.diagnosis`.
"""
