"""The conformance suite: the contracts of `hal.device` as tests, run on one device that is given by name.

    relay conformance DEVICE
    pytest -p hal.conformance.plugin --pyargs hal.conformance --device DEVICE [--verify-known-gaps]

It uses a device through `hal` alone, so it holds every backend to the same contracts; tests of one backend's own code
are not here. The reference for numbers is PyTorch in float64 on the host (`samples.oracle`), for random numbers
`hal.random`. A test of what `DeviceInfo` does not list is skipped; a test that the device should pass and does not is a
known gap (`hal.known_gaps`). No test asserts on time, and each one asks the device for something.
Only `relay.cli.conformance`, `relay.conformance` and tests may import it; `hal` and the backends may not.
"""
