"""From data files to batches: reading, fields, conversations, labels, tokens, packing, and the report of it all.

No model is built or trained here (`relay.finetuning.model_folder`, `relay.finetuning.run_loop`).
`relay.finetuning` alone may import it.
"""
