"""From shapes to a compiled model: the model is partitioned, its segments are captured and made into stages.

Not here: what a stage is (`relay.runtime.stages`), how a model is cut into segments (`relay.partition`), and which
compiled models are kept (`relay.runtime.compiler`). `relay.runtime` and what stands above it may import it.
"""
