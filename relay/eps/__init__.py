"""The eager param-server (EPS), the host's part: weights and optimizer states, and updates as gradients arrive.

Not here: an optimizer's arithmetic (`relay.optim`), the order of layers (`relay.runtime`), checkpoint files
(`relay.checkpoint`). `relay.checkpoint`, `relay.runtime` and what stands above them may import it.
"""
