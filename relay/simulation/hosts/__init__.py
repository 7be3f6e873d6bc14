"""Training on several hosts, one process a host: how the speed grows with their number, and what binds it.

Nothing of one host's step is simulated here: that is `relay.simulation`. The command line may import it.
"""
