"""Samples of the conformance suite: arguments for every op, the oracle, and the tolerances.

Here live the inputs that tests draw from a seed, and PyTorch in float64 as the reference for their results. No test is
here, and nothing of one device.

The suite, `relay.conformance` and tests may import it.
"""
