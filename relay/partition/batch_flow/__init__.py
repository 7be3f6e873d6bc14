"""Following the batch through a traced model: what each value has to do with the samples.

`flow` walks a trace and gives every value a label (`labels`); `rules` names the rule for each op; `layer_labels`
follows the batch through a layer's own code. What a loss is in terms of the labels is not decided here, but in
`relay.partition.loss_terms`. Only `relay.partition` may import it.
"""
