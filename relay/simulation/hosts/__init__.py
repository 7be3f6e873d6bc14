"""Training on several hosts, one process a host: how the speed grows with their number, and what binds it.

The step of one host is not simulated here; `relay.simulation` does that.
May be imported by `relay.cli`.
"""
