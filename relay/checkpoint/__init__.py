"""Checkpoints on disk: the format, reading and writing it, and files that are replaced in one step.

Not here: when a run saves and which checkpoints it keeps (`relay.checkpoint_manager`), and snapshots in memory
(`relay.eps.snapshot`). `relay.models`, `relay.runtime`, `relay.trainer` and what stands above them may import it.
"""
