"""Many settings of a simulated step: the points of a sweep, the table that can be continued, and heat maps.

Steps are simulated in `relay.simulation.simulate`; the command is `relay.cli.simulation.sweep`.
`relay/cli` may import it.
"""
