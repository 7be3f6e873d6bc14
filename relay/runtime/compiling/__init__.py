"""From a partition to the stages of a compiled model: its segments are captured, and made into programs to visit.

Not here: what a stage is (`relay.runtime.stages`), and how a model is cut into segments (`relay.partition`).
`relay.runtime` and what stands above it may import it.
"""
