"""Programs and models exported as ONNX files are valid, keep their names, and give the same results."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hal.errors import Unsupported
from relay.capture import CaptureRequest, capture
from tests.support.function_programs import core
from tests.support.zoo import small_models

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def test_a_segment_can_be_written_for_inspection_and_run_by_anyone(tmp_path: Path) -> None:
    from backends.onnx.device import export

    x, y = torch.randn(4, 5), torch.randn(5, 3)
    path = export(core(lambda x, y: F.gelu(x @ y), x, y), tmp_path / "segment.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (x.numpy(), y.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(found), F.gelu(x @ y))


def test_an_exported_model_has_the_models_own_names_and_gives_what_it_gives(tmp_path: Path) -> None:
    from relay.models.onnx_export import export_onnx

    model = small_models.build("gpt")
    ids = torch.randint(0, small_models.VOCABULARY, (2, small_models.LENGTH))
    path = export_onnx(model, {"input_ids": ids}, tmp_path / "model.onnx")
    assert model.training
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [info.name for info in proto.graph.input] == ["input_ids"]
    assert [info.name for info in proto.graph.output] == ["logits"]
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(stored[name].copy()), parameter.detach(), rtol=0, atol=0)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input_ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model.eval()(ids).logits.detach(), rtol=1e-4, atol=1e-5)


def test_an_export_names_ports_by_role_where_nobody_names_them(tmp_path: Path) -> None:
    from backends.onnx.device import export

    program = core(lambda x, y: (x @ y).view(2, 6), torch.randn(4, 5), torch.randn(5, 3))
    proto = onnx.load(export(program, tmp_path / "segment.onnx"))
    assert [info.name for info in proto.graph.input] == ["value.0", "value.1"]
    (result,) = proto.graph.output
    assert result.name == "result.0"
    assert [size.dim_value for size in result.type.tensor_type.shape.dim] == [2, 6]
    with pytest.raises(ValueError, match="1 input names for 2 inputs"):
        export(program, tmp_path / "wrong.onnx", ["x"])


def test_a_program_that_is_not_core_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from backends.onnx.device import export

    program = capture(CaptureRequest(nn.Linear(3, 4), [torch.zeros(2, 3)], "layer")).forward
    with pytest.raises(Unsupported, match=r"aten\..*Lowering\.CORE"):
        export(program, tmp_path / "layer.onnx")
