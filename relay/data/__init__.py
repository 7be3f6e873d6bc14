"""Batches: cut into micro-batches, padded to buckets, weighted in the loss, and iterated so that a run can resume.

Reading files and loading data with workers do not live here: any iterable, such as a DataLoader, is a source.
`relay.partition`, `relay.runtime` and the folders above them may import it.
"""
