"""Ranges of predicted figures: what a range is, and how fast each kind of software computes beside the simulator.

Steps are not simulated here, nor are models or machines described.
`relay/simulation` and `relay/cli` may import it.
"""
