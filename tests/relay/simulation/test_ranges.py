"""Ranges of predicted figures: their arithmetic, and which software has which range."""

import pytest

import relay
from hal import spec
from hal.spec import SOFTWARE
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.ranges.software_factors import FACTORS, kind_of, step_time


def test_the_range_of_days_is_the_inverse_of_that_of_speed() -> None:
    assert Ranged(2.0, 4.0, 8.0).inverse(16.0) == Ranged(2.0, 4.0, 8.0)
    assert Ranged(1.0, 2.0, 3.0).scaled(2.0).text("{:.0f}".format) == "4 (2 to 6)"
    with pytest.raises(ValueError, match="low <= middle <= high"):
        Ranged(3.0, 2.0, 1.0)


def test_every_kind_of_software_has_a_range_of_at_most_a_factor_of_two() -> None:
    assert set(FACTORS) == {*SOFTWARE, "calibrated"}
    for factor in FACTORS.values():
        assert factor.source
        assert factor.compute.width <= 2
        assert factor.others.width <= 2
    for kind in SOFTWARE:
        assert kind_of(spec.machine("rtx-4090", software=kind), "bf16") == kind


def test_slower_software_lengthens_compute_and_slower_links_the_wait_for_them() -> None:
    factor = FACTORS["eager"]
    only_compute, only_links = step_time(2.0, 2.0, factor), step_time(2.0, 0.0, factor)
    assert only_compute.high == pytest.approx(2.0 / factor.compute.low)
    assert only_links.low == pytest.approx(2.0 / factor.others.high)
    assert step_time(4.0, 2.0, factor).middle == pytest.approx(only_compute.middle + only_links.middle)


def test_the_middle_of_the_step_is_the_sum_of_its_waterfall_and_lies_in_its_range() -> None:
    found = relay.simulate(layers=2, hidden=32, device="rtx-4090", seq=32, batch=1)
    assert sum(found.expected_waterfall.values()) == pytest.approx(found.step_time.middle)
    assert found.speed.low < found.speed.middle < found.speed.high
    assert found.speed.middle * found.step_time.middle == pytest.approx(found.run.tokens)
    assert found.days(1e9).high == pytest.approx(1e9 / found.speed.low / 86400)
