"""The device slot: one layer-sized region of a device, its life cycle, and how a layer lies in it.

Not here: which layer a slot holds and when (`relay.runtime.schedule`), and the memory itself (`hal.device`). Anything
may import this folder.
"""
