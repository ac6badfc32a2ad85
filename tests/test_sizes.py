"""Sizes of layers and models that cannot be: one line that says so, when they are made."""

import pytest
import torch

from meshshard.comm import simulate
from meshshard.errors import MeshshardError
from meshshard.models import DGCNN, GeoTransolver, MeshGraphNet, Transolver
from meshshard.nn import Bottleneck, DeepHalo, check_consistency

WRONG = {
    "0 layers": lambda: Transolver(3, 1, layers=0),
    "0 slices": lambda: Transolver(3, 1, slices=0),
    "0 heads": lambda: Transolver(3, 1, heads=0),
    "GeoTransolver: expected 1 layer or more, got 0": lambda: GeoTransolver(3, 1, layers=0),
    "DGCNN: expected 1 layer or more, got 0": lambda: DGCNN(3, 1, layers=0),
    "networks of 0 linear layers": lambda: MeshGraphNet(3, 3, 1, depth=0),
    "0 heads do not divide": lambda: Bottleneck(16, 0),
    "DeepHalo: expected a depth of 1 or more, got 0": lambda: DeepHalo(torch.nn.Identity(), 0),
    "simulate: 0 ranks": lambda: simulate(0, lambda domain: domain.rank),
    "no y": lambda: check_consistency(
        torch.nn.Identity(), {"x": torch.ones(2, 1), "edge_index": torch.ones(2, 0).long()}
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_sizes_that_cannot_be_are_refused(words):
    with pytest.raises(MeshshardError, match=words):
        WRONG[words]()
