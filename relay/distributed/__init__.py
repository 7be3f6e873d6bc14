"""Several processes that train one model together: who owns what, what they send each other, what they agree on.

The arithmetic of one process is not here (`relay.eps`, `relay.runtime`). `relay.trainer`, `relay.run_state`,
`relay.checkpoint_manager` and `relay.cli` may import it.
"""
