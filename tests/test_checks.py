"""An inconsistent mesh is refused, and the message names the cell, point or field."""

from dataclasses import replace

import numpy as np
import pytest

from meshshard.errors import MeshError, MeshWarning, n_of
from meshshard.io import from_arrays
from meshshard.mesh import Faces, Mesh
from meshshard.mesh.checks import check
from meshshard.partitioning.partition import partition

SQUARE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])


def test_forms_of_cells():
    quads = from_arrays(SQUARE, np.array([[0, 1, 2, 3]]))
    listed = from_arrays(SQUARE, [[0, 1, 2, 3]])
    ragged = from_arrays(SQUARE, (np.array([0, 4]), np.arange(4)))
    for mesh in (quads, listed, ragged):
        assert mesh.types.tolist() == [9]
        assert mesh.connectivity.tolist() == [0, 1, 2, 3]
    mixed = from_arrays(SQUARE, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 0]])
    assert mixed.types.tolist() == [5, 9, 7]
    assert from_arrays(SQUARE[:, :2]).points.shape == (4, 3)
    assert from_arrays(SQUARE).kind == "point cloud"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cells": [[0, 1, 4]]}, "cell 0 refers to point 4"),
        ({"cells": [[0, 1, 2], [0, -1, 2]]}, "cell 1 refers to point -1"),
        ({"cells": [[0, 1]]}, "cell 0 is a polygon with 2 points"),
        (
            {"cells": np.array([[0, 1, 2.5]])},
            "cells are float64; convert the point ids to integers",
        ),
        ({"cells": [[0, 1, 2.5], [0, 1, 2, 3]]}, "cells are float64"),
        ({"cells": np.ones((2, 3), bool)}, "cells are bool"),
        ({"cells": (np.array([0, 4, 3]), np.arange(4))}, "cell 1: offset 3 goes backwards"),
        ({"cells": (np.array([0, 3]), np.arange(4))}, "offset 3 does not fit"),
        ({"cells": (np.array([1, 4]), np.arange(4))}, "offsets must be"),
        ({"cell_fields": {"p": np.zeros(1)}}, "cell field 'p' has 1 row for 0 cells"),
        ({"point_fields": {"p": np.zeros(5)}}, "point field 'p' has 5 rows for 4 points"),
        ({"point_fields": {"p": 3.0}}, "point field 'p': a single value; give an array"),
        (
            {"point_fields": {"p": np.ma.masked_less(np.arange(4), 2)}},
            "'p': 2 values masked; replace",
        ),
    ],
)
def test_inconsistent_meshes_are_refused(options, words):
    with pytest.raises(MeshError, match=words):
        from_arrays(SQUARE, **options)


@pytest.mark.parametrize(("values", "words"), [(np.zeros(3), "3 rows"), (1.0, "a single value")])
def test_no_mesh_has_fields_of_another_length(values, words):
    quads = from_arrays(SQUARE, np.array([[0, 1, 2, 3]]))
    with pytest.raises(MeshError, match=f"cell field 'p' has {words} for 1 cell"):
        quads.with_fields(cell={"p": values})
    with pytest.raises(MeshError, match=f"point field 'p' has {words} for 4 points"):
        replace(quads, point_fields={"p": values})


def test_points():
    with pytest.raises(MeshError, match=r"\(n, 3\), got \(4, 4\)"):
        from_arrays(np.eye(4))
    bad = np.zeros((10, 3))
    bad[[2, 3, 5], 1] = np.nan, np.inf, -np.inf
    with pytest.raises(MeshError, match=r"3 points not finite .* ids 2, 3, 5"):
        from_arrays(bad)
    with pytest.raises(MeshError, match="ids 0, 1, 2, 3, 4, …"):
        from_arrays(np.full((10, 3), np.nan))
    with pytest.raises(MeshError, match="points: 3 values masked"):
        from_arrays(np.ma.masked_less(np.arange(12.0).reshape(4, 3), 3))


def test_fields_that_are_not_finite_are_counted():
    with pytest.warns(MeshWarning, match="point field 'p' has 2 NaN and 1 infinite"):
        from_arrays(SQUARE, point_fields={"p": np.array([1, np.nan, np.nan, np.inf])})


def test_dimensions_and_faces():
    points = np.vstack([SQUARE, [[0, 0, 1]]])
    mixed = Mesh(points, np.arange(3), np.array([0, 1, 3]), np.array([1, 3], np.uint8))
    with pytest.raises(MeshError, match="several dimensions"):
        check(mixed)
    solid = Mesh(
        points, np.arange(4), np.array([0, 4]), np.array([42], np.uint8),
        faces=Faces(
            np.array([0, 4]), np.arange(5) * 3, np.array([0, 1, 2, 0, 1, 3, 0, 2, 3, 1, 2, 9])
        ),
    )  # fmt: skip
    with pytest.raises(MeshError, match="face 3 refers to point 9"):
        check(solid)


def test_n_of_uses_the_singular_for_one() -> None:
    assert [n_of(n, "halo rows") for n in (0, 1, 2, 9794)] == [
        "0 halo rows", "1 halo row", "2 halo rows", "9,794 halo rows",
    ]  # fmt: skip
    one = Mesh(points=np.zeros((1, 3)))
    assert repr(one) == "Mesh(mesh: point cloud, 1 point, 0 cells)"
    assert "1 point in 1 shard" in repr(partition(one, 1))
