"""Models and their files: the byte-level GPT of `relay train`, Hugging Face folders, and export to ONNX.

Training and checkpoints of runs do not live here (`relay.trainer`, `relay.checkpoint`).
`relay.partition` and the folders above it may import it. `GPT`, `empty_weights` and `load_weights` are public names.
"""

from relay.models.gpt import GPT
from relay.models.huggingface import empty_weights
from relay.models.load_pretrained import load_weights

__all__ = ["GPT", "empty_weights", "load_weights"]
