"""Runs passes over a model on one device: compiled stages, slots, stash, the schedule, and what guards a step.

Not here: host memory and updates (`relay.eps`), cutting a model into segments (`relay.partition`), graphs
(`relay.capture`). `relay.trainer`, `relay.simulation` and what stands above them may import it.
"""
