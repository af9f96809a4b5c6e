"""Constants of a model on the devices that read them; the meta device stands for a GPU."""

from __future__ import annotations

import copy
import pickle

import torch

from attention.base.constants import DeviceConstant


def test_each_device_has_one_copy() -> None:
    constant = DeviceConstant(torch.tensor([2, 0, 1]))
    assert constant.on(torch.device("cpu")) is constant.tensor
    copied = constant.on(torch.device("meta"))
    assert copied.device.type == "meta"
    assert constant.on(torch.device("meta")) is copied


def test_a_copy_that_inference_made_can_be_trained_with() -> None:
    constant = DeviceConstant(torch.tensor([1.0, 2.0]))
    with torch.inference_mode():
        assert not constant.on(torch.device("meta")).is_inference()


def test_it_is_pickled_and_copied_without_the_copies_of_devices() -> None:
    constant = DeviceConstant(torch.tensor([2, 0, 1]))
    constant.on(torch.device("meta"))
    for other in (pickle.loads(pickle.dumps(constant)), copy.deepcopy(constant)):
        assert vars(other)["_copies"] == {}
        assert other.on(torch.device("cpu")).tolist() == [2, 0, 1]
