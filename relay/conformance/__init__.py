"""Conformance as the relay sees it: `relay conformance DEVICE`, and the part of the suite that trains.

The suite itself is `hal.conformance`, which knows devices and no relay; here is what needs both. Together:
`pytest -p hal.conformance.plugin --pyargs hal.conformance relay.conformance --device NAME`.
"""
