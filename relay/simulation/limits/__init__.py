"""How far a run can grow on a machine: the longest sequence that fits.

Steps are not simulated here, but the memory that they need is; the options of a run are not chosen (`plan` does that).
`relay.cli` and the folders above it may import it.
"""
