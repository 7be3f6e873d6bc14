"""Gradients of tied weights in PyTorch's order of addition: per micro-batch over the uses, then over micro-batches.

Not here: sums of uses on the host, which add micro-batches first (`relay.eps.server`), and where values live during a
step (`relay.runtime.stash`). `relay.runtime` and what stands above it may import it.
"""
