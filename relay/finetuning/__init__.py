"""Fine-tuning a Hugging Face model on a file: what `relay finetune` does, as functions.

Steps, optimizers and checkpoints do not live here (`relay.trainer`, `relay.checkpoint`), nor does output on a terminal.
`relay.cli` may import it, and so may any script: `from relay.finetuning.finetune import finetune`.
"""
