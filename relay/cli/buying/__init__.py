"""The options of `relay plan` that compare machines, and what is printed for them.

What is compared is worked out in `relay.simulation.buying`.
`relay.cli.plan` imports it.
"""
