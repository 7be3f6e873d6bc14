"""The suite that every backend must pass: `hal.device`'s contracts as tests, for a device given by name.

    relay conformance DEVICE
    pytest --pyargs hal.conformance --device DEVICE [--verify-gaps]

It uses a device only through `hal`, so a stranger's backend is held to the same as ours. The reference for numbers is
PyTorch in float64 on the host (`oracle`), for random numbers `hal.random`. What a device says it lacks in `DeviceInfo`
is skipped; what it should do and does not yet stands in its backend's `gaps`, with a reason. Invariant: no test asserts
on time, and none passes without having asked the device something.
"""
