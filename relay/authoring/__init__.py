"""What Relay gives the author of a backend: a package to start from, and a conformance report to publish.

Not here: the contracts (`hal`), the parts that backends share (`hal.kit`) and the conformance suite itself.
`relay/cli` imports it; it imports `hal` and `relay/errors`.
"""
