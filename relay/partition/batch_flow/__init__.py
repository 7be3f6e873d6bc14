"""Following the batch through a traced model: what each value has to do with the samples.

`flow` walks a trace and gives every value a label (`labels`); `rules` says by which rule an op is labelled. What a
loss then is, `relay.partition.loss_terms` says.
"""
