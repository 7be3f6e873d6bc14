"""The slots of a device: those that layers take in turn, those of resident layers, and which layers are resident.

Not here: what a slot is (`hal.slot`), and the order of visits (`relay.runtime.schedule`). The rest of `relay.runtime`
may import it, and `relay.simulation` for its figures.
"""
