"""The stash: where the values between segments, and their gradients, live during a step.

`plan` assigns them memory before a run and counts bytes; `memory` is that memory with the events that guard it. Not
here: which values there are (`relay.partition`). The rest of `relay.runtime` may import it, and `relay.simulation`.
"""
