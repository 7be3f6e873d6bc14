"""The hardware abstraction layer: what a device is.

It defines devices, slots, queues, events, transfers, programs, kernels and the host, as contracts written in prose
in the interface files. It knows nobody above it: nothing here imports `backends` or `relay`, and a test reads the
imports to keep it so.
"""
