"""The device slot: its layout, its states, what it sends and what it accounts for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import OutOfMemory
from hal.registry import open as open_device
from hal.slot.device_slot import DeviceSlot, SlotState
from hal.slot.layout import ALIGNMENT, lay_out
from tests.support.slot_bench import FEATURES, SHAPES, SIZE, Bench, content_of, expected_output, same_gradients

# **** layout ****

tensors = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]),
    ),
    max_size=10,
)


@given(wanted=tensors)
def test_tensors_are_laid_out_aligned_in_order_without_overlap_or_waste(wanted: list) -> None:
    fields, total = lay_out(wanted)
    assert [(field.shape, field.dtype) for field in fields] == wanted
    end = 0
    for field in fields:
        assert field.offset % ALIGNMENT == 0
        assert 0 <= field.offset - end < ALIGNMENT
        end = field.offset + torch.empty(field.shape, dtype=field.dtype).nbytes
    assert 0 <= total - end < ALIGNMENT
    assert total % ALIGNMENT == 0


def test_the_views_of_a_slot_are_aligned_and_do_not_move(bench: Bench) -> None:
    first, second = content_of("one", 1.0), content_of("other", 2.0)
    bench.load(first)
    parameters, gradients = list(bench.slot.parameters), list(bench.slot.gradients)
    bench.load(second)
    bench.load(first, 1)
    assert bench.slot.parameters == parameters
    assert bench.slot.gradients == gradients
    assert [view.shape for view in parameters] == [shape for shape, _ in SHAPES]
    if bench.device.info.unified:
        for view in gradients:
            assert bench.device.host_tensor(view).data_ptr() % ALIGNMENT == 0


# **** what it holds ****


def test_a_kernel_computes_with_what_was_loaded(bench: Bench) -> None:
    for value in (1.5, -2.0):
        bench.load(content_of("layer", value))
        bench.run_forward().wait()
        assert torch.equal(bench.fetch(bench.output), expected_output(value))


def test_the_same_content_and_version_is_not_sent_again(apart: Bench) -> None:
    content = content_of("layer", 1.0)
    first = apart.load(content, 3)
    first[-1].wait()
    content.tensors[0].fill_(9.0)
    assert apart.load(content, 3) == first
    apart.run_forward().wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(1.0))


def test_another_version_is_sent_again(apart: Bench) -> None:
    content = content_of("layer", 1.0)
    apart.load(content, 3)[-1].wait()
    for tensor in content.tensors:
        tensor.fill_(9.0)
    apart.load(content, 4)
    apart.run_forward().wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(9.0))


def test_equal_but_other_content_is_sent(apart: Bench) -> None:
    apart.load(content_of("layer", 1.0), 3)
    apart.load(content_of("layer", 2.0), 3)
    apart.run_forward().wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(2.0))


def test_on_a_unified_device_nothing_moves(bench: Bench) -> None:
    content = content_of("layer", 1.0)
    bench.load(content)[-1].wait()
    for tensor in content.tensors:
        tensor.fill_(5.0)
    bench.run_forward().wait()
    moved = 5.0 if bench.device.info.unified else 1.0
    assert torch.equal(bench.fetch(bench.output), expected_output(moved))


def test_gradients_are_drained_as_autograd_has_them(bench: Bench) -> None:
    bench.load(content_of("layer", 1.0))
    bench.run_backward()
    found = torch.empty(SIZE, dtype=torch.uint8)
    bench.drain(found)[-1].wait()
    assert same_gradients(found, 1.0)


def test_parameters_can_be_sent_home(apart: Bench) -> None:
    apart.load(content_of("layer", 4.0), wait=[apart.gate])
    weight = torch.zeros(2, FEATURES)
    sent = apart.slot.send(apart.device.queue("drain"), [(weight, apart.slot.parameters[0])])
    assert not sent[-1].done()
    apart.open_gate()
    sent[-1].wait()
    assert torch.equal(weight, torch.full((2, FEATURES), 4.0))


# **** states and memory ****


def test_a_slot_goes_round_its_life(bench: Bench) -> None:
    slot = bench.slot
    assert (slot.state, slot.content) == (SlotState.EMPTY, None)
    content = content_of("layer", 1.0)
    bench.load(content, 7)
    assert (slot.state, slot.content, slot.version) == (SlotState.READY, content, 7)
    bench.run_forward()
    assert slot.state is SlotState.COMPUTING
    bench.run_backward()
    assert slot.state is SlotState.COMPUTING
    drained = bench.drain(torch.empty(SIZE, dtype=torch.uint8))
    assert slot.state is SlotState.DRAINING
    slot.hold_gradients(drained)
    assert slot.state is SlotState.DRAINING
    bench.load(content, 8)
    assert slot.state is SlotState.READY
    bench.device.close()
    slot.free()
    assert (slot.state, slot.content) == (SlotState.EMPTY, None)


def test_a_slot_is_accounted_for_parameters_and_gradients_and_gives_them_back(bench: Bench) -> None:
    before = bench.device.memory().in_use
    slot = DeviceSlot(bench.device, 1, 1000, 300)
    assert bench.device.memory().in_use - before == 1300
    slot.free()
    slot.free()
    assert bench.device.memory().in_use == before


def test_a_slot_that_does_not_fit_says_which_part_and_leaves_nothing_behind() -> None:
    device = open_device("cpu:discrete", capacity=1500)
    with pytest.raises(OutOfMemory, match="gradients of slot 3") as caught:
        DeviceSlot(device, 3, 1000, 600)
    assert (caught.value.requested, caught.value.in_use) == (600, 1000)
    assert device.memory().in_use == 0
    with pytest.raises(OutOfMemory, match="parameters of slot 3"):
        DeviceSlot(device, 3, 2000, 600)
    assert device.memory().in_use == 0
    device.close()


def test_a_content_too_large_for_the_slot_is_a_value_error(apart: Bench) -> None:
    small = DeviceSlot(apart.device, 1, SIZE - ALIGNMENT, SIZE)
    with pytest.raises(ValueError, match="does not lie"):
        small.load(content_of("layer", 1.0), 0, apart.device.queue("load"))
    assert small.content is None
