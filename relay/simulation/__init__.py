"""Predictions for hardware that is not present: simulated steps, plans, calibration and their reports.

Not here: the simulated device itself (`backends/simulator`) and descriptions of hardware (`hal/spec`).
Imported by `relay/cli` and the package `relay`; no other folder of `relay` may import it.
"""
