"""Several ranks in tests: how they are started, what they run, and the small models that they train.

Assertions are not here. Tests of `relay.distributed` and of the commands may import it.
"""
