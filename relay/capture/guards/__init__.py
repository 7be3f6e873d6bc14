"""Checks around a trace: what the traced code reads and changes, which batches a trace serves, what is refused.

Tracing, graphs and programs do not live here, except for the small graphs that guards re-evaluate.
The other modules of `relay.capture`, `relay.partition` and `relay.runtime` may import it.
"""
