"""ONNX Runtime as a device: any execution provider by its short name, `onnx:cpu`, `onnx:cuda`, `onnx:openvino`, ...

`emit` writes a core program as an ONNX model by hand, with the ops of `elementwise`, `shapes`, `reductions`, `indexing`
and `windows`; `sessions` loads models and binds memory to them; `providers` finds execution providers; `device` is
the backend. Inside this package `import onnx` is the library, which needs `onnxruntime` and `onnx` installed.
"""
