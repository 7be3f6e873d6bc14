"""Models and their files: the byte-level GPT of `relay train`, Hugging Face folders, and export to ONNX.

Training and checkpoints of runs do not live here (`relay.trainer`, `relay.checkpoint`).
`relay.partition` and the folders above it may import it. `GPT` is a public name.
"""

from relay.models.gpt import GPT

__all__ = ["GPT"]
