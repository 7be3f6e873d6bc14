"""The part of the conformance suite that trains through the relay on the device under test.

Not here: tests of the device alone (`hal.conformance`). Run by `relay/cli/conformance`; imported by no other code.
To run both parts with pytest:
`pytest -p hal.conformance.plugin --pyargs hal.conformance relay.conformance --device NAME`.
"""
