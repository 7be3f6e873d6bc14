"""The eager param-server (EPS): the host's part of the relay.

`store` keeps the weights layer by layer, `optimizers` updates them, `server` does so as gradients arrive.
"""
