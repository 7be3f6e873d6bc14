"""The code around a model's layers where it has no graph: it runs as the model's own Python, with the layers left out.

What each part of it needs, and the partition made of the parts. Layers are captured as in any other partition, and
nothing is captured or run for a step here. `relay.partition` may import it.
"""
