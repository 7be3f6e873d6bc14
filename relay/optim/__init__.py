"""Optimizers: their hyperparameters and arithmetic on host memory, loss scaling, and parameter groups.

Not here: allocating states, and when an update happens (`relay.eps`). Everything in relay from `relay.eps` upwards may
import it. Of relay, it imports `relay.errors` alone.
"""
