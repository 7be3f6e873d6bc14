"""Lanes: the devices that a pass runs on, and which of them runs which segment.

Not here: the order in which calls are submitted (`relay.runtime.schedule`), and where values between segments wait
(`relay.runtime.stash`). The rest of `relay.runtime` may import it, and `relay.simulation` for its figures.
"""
