"""What runs after the last layer in another cut than the layers: over the whole batch, or over chunks of positions.

No partitions are made here (`relay.partition`), and layers are not known. `relay.runtime` and the folders above it may
import it.
"""
