"""The hardware abstraction layer: the interfaces of a device and its contracts.

Here live `device`, `event`, `host` and `program`, and what every device needs: slots, memory accounts, dtypes, errors,
random numbers, the registry. No device is implemented here, and nothing of training.

Everything may import it. `hal` imports neither `backends` nor `relay`.
"""
