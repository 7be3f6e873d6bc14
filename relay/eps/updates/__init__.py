"""How a segment's parameters are updated: the optimizer's call, or two halves with a device's part between them.

Not here: the arithmetic (`relay.optim`), and whether and when a step is applied (`relay.eps.server`, which alone of
`relay.eps` imports it).
"""
