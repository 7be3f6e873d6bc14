"""The backend `onnx`: the execution providers of ONNX Runtime, as `onnx:cpu`, `onnx:cuda`, `onnx:openvino` and so on.

Here live `emit`, which writes a core program as an ONNX model, with the ops of `elementwise`, `reductions`, `indexing`
and `windows`; `sessions`, which loads models and binds memory to them; `providers`, which finds execution providers;
and the `device`. Queues and host memory are in `hal.kit.host_device`. Inside this package `import onnx` is the library;
the backend needs `onnxruntime` and `onnx` installed.

The registry imports it, by entry point, and tests may.
"""
