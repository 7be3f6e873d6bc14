"""`relay.fit`: the options with which a user's own model trains fastest on a machine, and what would make it fit.

Not here: the simulation and the search over candidates (`relay.simulation`). `relay.cli` may import it, and so may what
stands above the trainer.
"""
