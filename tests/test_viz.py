"""Pictures, tested by their pixels; without OpenGL there is a one-line error."""

import base64
import io as streams
import json
import os
import re
import resource
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import meshshard
from meshshard import io
from meshshard.cli.main import main
from meshshard.errors import MeshWarning, RenderError, StoreError
from meshshard.graph import Graph
from meshshard.mesh import Mesh
from meshshard.partitioning.partition import Partition, partition
from meshshard.viz import (
    Panel,
    Scale,
    Style,
    Subject,
    plot_agreement,
    plot_bars,
    plot_panels,
    plot_prediction,
    plot_rank_graph,
    plot_shards,
    scale_of,
    view,
)
from meshshard.viz.annotations import label_positions, legend_columns
from meshshard.viz.camera import default_direction
from meshshard.viz.colors import _TO_LINEAR, _TO_LMS, palette, shard_colors
from meshshard.viz.scene import scene_of

pytestmark = pytest.mark.slow

SURFACE = Path(meshshard.__file__).parent / "data" / "boundary_1.vtp"
BARE = Style(size=(600, 400), off_screen=True, flat=True, lines=False, numbers=False, legend=False)
SMALL = Style(size=(600, 400), off_screen=True)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return io.read(SURFACE)


@pytest.fixture(scope="module")
def parts(mesh: Mesh) -> Partition:
    return partition(mesh, 8)


def cube(n: int) -> Mesh:
    """n x n x n hexahedra."""
    import pyvista

    grid = pyvista.ImageData(dimensions=(n + 1, n + 1, n + 1))
    grid.cell_data["p"] = np.arange(n**3, dtype=float)
    return io.from_pyvista(grid, "cube")


def shot(what, **options) -> np.ndarray:
    options.setdefault("style", SMALL)
    made = plot_shards(what, **options)
    picture = made.screenshot(return_img=True)
    made.close()
    return picture


def colors_in(picture: np.ndarray, min_pixels: int = 20) -> set[tuple[int, ...]]:
    """Colors of at least `min_pixels` pixels, without white, gray and black."""
    found, count = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
    found = found[(count >= min_pixels) & (np.ptp(found.astype(int), axis=1) > 8)]
    return {tuple(c) for c in found.tolist()}


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Fraction of pixels that differ."""
    return float((a != b).any(axis=2).mean())


# ----------------------------------------------------------------------------------------- colors
@pytest.mark.parametrize("k", [1, 2, 8, 64, 200])
def test_every_shard_has_a_different_color(k: int) -> None:
    chain = np.eye(k, k=1, dtype=int)
    colors = shard_colors(k, chain)
    assert colors.shape == (k, 3)
    assert len(np.unique(colors, axis=0)) == k


def test_64_colors_differ_and_those_of_neighbors_differ_most() -> None:
    lab, rgb = palette(64)
    place = np.stack(np.meshgrid(range(8), range(8)), -1).reshape(-1, 2)
    near = np.abs(place[:, None] - place).max(axis=2) == 1
    order = [rgb.tolist().index(c) for c in shard_colors(64, near.astype(int)).tolist()]
    distance = np.linalg.norm(lab[order][:, None] - lab[order], axis=2)
    assert distance[~np.eye(64, dtype=bool)].min() > 0.035
    assert distance[near].min() > 0.1  # five times a just noticeable difference


def test_more_than_256_shards_have_a_color_each() -> None:
    assert shard_colors(700, np.zeros((700, 700), int)).shape == (700, 3)


def oklab(rgb: np.ndarray) -> np.ndarray:
    part = rgb / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ np.linalg.inv(_TO_LINEAR)) @ np.linalg.inv(_TO_LMS.T)


@pytest.mark.parametrize("kind", ["surface", "solid", "plate"])
@pytest.mark.parametrize(("k", "most"), [(8, 0.02), (16, 0.08)])
def test_in_light_a_shard_is_nearest_to_its_own_color(
    mesh: Mesh, kind: str, k: int, most: float
) -> None:
    import pyvista

    plate = io.from_pyvista(pyvista.Plane(direction=(1, 2, 3)))
    parts = partition({"surface": mesh, "solid": cube(8), "plate": plate}[kind], k)
    own = shot(parts, style=BARE).reshape(-1, 3)
    lit = shot(parts, style=replace(BARE, flat=False)).reshape(-1, 3)
    colors = parts.subject().colors
    owner = (own[:, None] == colors).all(axis=2)
    body = owner.any(axis=1)
    distance = np.linalg.norm(oklab(lit[body])[:, None] - oklab(colors), axis=2)
    assert (distance.argmin(axis=1) != owner[body].argmax(axis=1)).mean() < most


def test_a_flat_mesh_is_seen_straight_on() -> None:
    import pyvista

    normal = np.array([1.0, 2.0, 3.0]) / 14**0.5
    points = np.asarray(pyvista.Plane(direction=normal).points, np.float64)
    np.testing.assert_allclose(default_direction(points), normal, atol=1e-6)


# ---------------------------------------------------------------------------------------- pictures
def test_a_flat_picture_has_exactly_the_colors_of_the_shards(parts: Partition) -> None:
    from meshshard.viz.subject import subject_of

    known = {tuple(c) for c in subject_of(parts).colors.tolist()}
    picture = shot(parts, style=replace(BARE, legend=True))
    assert colors_in(picture) == known  # the legend shows those of hidden shards


def test_without_a_legend_only_visible_shards_have_colors(parts: Partition) -> None:
    seen = colors_in(shot(parts, style=BARE), min_pixels=60)
    assert 4 <= len(seen) <= 8


def test_numbers_lines_and_legend_change_the_picture(parts: Partition) -> None:
    bare = shot(parts, style=BARE)
    for part in ("numbers", "lines", "legend"):
        more = replace(BARE, **{part: True})
        assert difference(bare, shot(parts, style=more)) > 1e-3, part


@pytest.mark.parametrize("k", [1, 2, 8, 30])
def test_swatches_of_a_legend_can_be_seen(mesh: Mesh, k: int) -> None:
    parts = partition(mesh, k)
    style = replace(BARE, legend=True, size=(1200, 760))
    share = legend_columns(["0    9,999"] * k, style.size)[1]
    right = shot(parts, style=style)[:, int(1200 * (1 - share)) - 5 :]
    for color in parts.subject().colors:
        assert (right == color).all(axis=2).sum() > 200


def test_explode_and_halo_change_the_picture(parts: Partition) -> None:
    whole = shot(parts)
    exploded = shot(parts, explode=0.6)
    one = shot(parts, halo=3)
    assert difference(whole, exploded) > 0.1
    assert difference(whole, one) > 0.1
    without = shot(parts, explode=0.6, style=replace(SMALL, halos=False))
    assert difference(exploded, without) > 1e-3


def test_a_field_is_drawn_by_name(parts: Partition) -> None:
    assert difference(shot(parts), shot(parts, field="pMeanTrim")) > 0.1
    shot(parts, field="wallShearStressMeanTrim")
    with pytest.raises(RenderError, match=r"field 'q' does not exist.*pMeanTrim"):
        plot_shards(parts, field="q")


def test_colors_of_a_field_are_those_of_its_bar(parts: Partition) -> None:
    picture = shot(parts, field="CpMeanTrim", style=replace(BARE, flat=False))
    body = picture.reshape(-1, 3)[picture.reshape(-1, 3).min(axis=1) < 250].astype(int)
    table = scale_of(parts.mesh.cell_fields["CpMeanTrim"], "Cp").table().values[:, :3].astype(int)
    distance = np.abs(body[::50, None] - table).max(axis=2).min(axis=1)
    assert (distance <= 2).mean() > 0.9  # the others are text, thin edges and their blends


@pytest.mark.parametrize(("values", "scale", "ticks", "notes"), [
    ([0.0, 9.7], ("a", 0.0, 9.7, "viridis"), ["0", "2", "4", "6", "8"], []),
    ([-1.84, 0.99], ("a", -1.84, 1.84, "coolwarm"),
     ["-1.5", "-1.0", "-0.5", "0.0", "0.5", "1.0", "1.5"], []),
    ([-0.01, 40.0, np.nan], ("a", -0.01, 40.0, "viridis"), ["0", "10", "20", "30", "40"],
     ["black: no value"]),
    ([3.0, 3.0], ("a", 1.5, 4.5, "viridis"), None, []),
    ([0.0, 2e6], ("a", 0.0, 2e6, "viridis"), ["0", "5e+05", "1e+06", "1.5e+06", "2e+06"], []),
])  # fmt: skip
def test_scales(values: list, scale: tuple, ticks: list | None, notes: list) -> None:
    made = scale_of(np.array(values), "a")
    assert (made.title, made.low, made.high, made.cmap) == scale
    assert ticks is None or list(made.ticks().values()) == ticks
    assert made.notes(np.array(values)) == notes


def test_a_range_that_cuts_values_is_said() -> None:
    values = np.array([-2.0, 0.0, 1.0])
    scale = scale_of(values, "Cp", unit="-", clim=(-1, 1))
    assert scale.title == "Cp [-]"
    assert scale.notes(values) == ["colors end at -1 and 1; values are -2 to 1"]
    powers = scale_of(values, "e", clim=(1e-8, 1e-2), log=True).ticks()
    assert list(powers.values()) == ["1e-8", "1e-6", "1e-4", "1e-2"]


def test_lines_are_drawn_in_parts() -> None:
    import pyvista

    turn = np.linspace(0, 12, 400)
    xyz = np.stack([np.cos(turn), np.sin(turn), turn / 8], 1)
    parts = partition(io.from_pyvista(pyvista.Spline(xyz, 400)), 8)
    assert len(colors_in(shot(parts, style=BARE))) == 8
    assert difference(shot(parts, style=BARE), shot(parts, style=replace(BARE, numbers=True))) > 0


def test_every_piece_of_a_shard_has_its_number() -> None:
    import pyvista

    places = [(i, 0, 0) for i in range(6)]
    bodies = pyvista.merge([pyvista.Sphere(radius=0.4, center=p) for p in places])
    mesh = io.from_pyvista(bodies)
    part = np.round(mesh.centers()[:, 0]).astype(int) // 2
    parts = partition(mesh, 3, on="cells", method=part)
    made = plot_shards(parts, style=BARE)
    texts, positions = label_positions(scene_of(parts.subject(), 0.0, None, BARE).body, made)
    made.close()
    assert sorted(texts) == ["0", "0", "1", "1", "2", "2"]
    assert sorted(np.round(positions[:, 0])) == list(range(6))


def test_text_and_lines_grow_with_the_picture(parts: Partition) -> None:
    small, large = (shot(parts, style=replace(SMALL, size=s)) for s in ((1200, 760), (2400, 1520)))
    half = large.reshape(760, 2, 1200, 2, 3).mean(axis=(1, 3))
    assert (np.abs(half - small).max(axis=2) > 60).mean() < 0.01


def test_slices_focus_and_zoom() -> None:
    parts = partition(cube(8), 9)
    flat = shot(parts, style=replace(BARE, slice="z"))
    assert 5 <= len(colors_in(flat)) <= 9
    assert difference(flat, shot(parts, style=replace(BARE, slice="z=0.1"))) > 0.1
    body = (flat < 250).any(axis=2).mean()
    small = shot(parts, style=replace(BARE, slice="z", zoom=0.5))
    assert (small < 250).any(axis=2).mean() < body / 3
    corner = shot(parts, style=replace(BARE, slice="z", focus=(0, 2, 0, 2, 4, 4)))
    assert len(colors_in(corner)) < len(colors_in(flat))


def test_folder_subject_and_partition_make_the_same_picture(
    mesh: Mesh, parts: Partition, tmp_path: Path
) -> None:
    folder = parts.save(tmp_path / "s.shards")
    first = shot(parts)
    assert difference(first, shot(folder)) == 0
    assert difference(first, shot(parts.subject())) == 0
    assert difference(first, shot(partition(mesh, 8, method=parts.labels))) < 1e-3


def test_shards_of_points_are_drawn_on_the_cells(mesh: Mesh) -> None:
    parts = partition(mesh, 5, on="points")
    assert len(colors_in(shot(parts, style=BARE), min_pixels=60)) >= 3
    shot(parts, explode=0.4)


def test_a_cloud_is_drawn_as_points(mesh: Mesh) -> None:
    parts = partition(Mesh(points=mesh.points[::3]), 6)
    assert len(colors_in(shot(parts, style=BARE), min_pixels=20)) >= 6
    shot(parts, halo=2)
    shot(parts, explode=0.5)


def test_a_bare_graph_is_drawn_at_its_positions() -> None:
    ring = np.stack([np.roll(np.arange(60), 1), np.roll(np.arange(60), -1)], 1).ravel()
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    places = np.stack([np.cos(angle), np.sin(angle), 0 * angle], 1)
    graph = Graph(np.arange(0, 121, 2), ring, symmetric=True, positions=places)
    assert len(colors_in(shot(partition(graph, 4), style=BARE), min_pixels=10)) >= 4
    nowhere = partition(Graph(np.arange(0, 121, 2), ring, symmetric=True), 4)
    with pytest.raises(RenderError, match="a graph without positions cannot be drawn"):
        plot_shards(nowhere)
    assert "rows in one exchange" in plot_rank_graph(nowhere).text


def test_a_solid_is_clipped_by_default() -> None:
    parts = partition(cube(8), 9)
    inside = shot(parts)
    assert difference(inside, shot(parts, style=replace(SMALL, clip=""))) > 0.05
    shot(parts, explode=0.5)
    shot(parts, halo=4)
    shot(parts, field="p")


def test_large_meshes_are_drawn_coarser_with_a_warning(parts: Partition, mesh: Mesh) -> None:
    with pytest.warns(MeshWarning, match=r"drawn coarser: 1,\d\d\d of 9,794 cells"):
        coarse = shot(parts, style=replace(SMALL, max_cells=2000))
    assert difference(coarse, shot(parts)) < 0.25
    cloud = partition(Mesh(points=mesh.points), 4)
    with pytest.warns(MeshWarning, match="2,000 of 9,825 points"):
        shot(cloud, style=replace(SMALL, max_cells=2000))


def test_empty_shards_can_be_drawn(mesh: Mesh) -> None:
    parts = partition(mesh, 3, method=np.where(np.arange(mesh.n_cells) < 5000, 0, 2))
    shot(parts, explode=0.5)
    assert "0 + 0" in plot_bars(parts).text
    plot_rank_graph(parts)


def test_invalid_requests_are_render_errors(mesh: Mesh, parts: Partition, tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"is not partitioned; draw partition\(mesh, parts\)"):
        plot_shards(mesh)
    with pytest.raises(RenderError, match="shards are 0 to 7"):
        plot_shards(parts, halo=8)
    for style, said in [
        (Style(clip="w"), r"a plane is 'w'; expected an axis such as 'x', '-x' or 'x=0.5'"),
        (Style(clip="x=1e"), "a plane is 'x=1e'"),
        (Style(slice="x"), "boundary_1.vtp: slice= needs a volume"),
        (Style(focus="body"), "focus is 'body'; expected six numbers"),
        (Style(cmap="rainbows"), "color map 'rainbows' does not exist"),
        (Style(clim=(1.0, 1.0)), "expected two rising numbers"),
        (Style(clim=(1.0,)), "clim is .* expected 2 numbers"),
        (Style(size=(0, 10)), "size is .* expected pixels up to 20,000"),
        (Style(size=(1e3, 10)), "size is .* expected pixels"),
        (Style(zoom=-1.0), "zoom is -1.0; expected above 0"),
        (Style(zoom=float("nan")), "zoom is nan"),
        (Style(direction=(0.0, 0.0, 0.0)), r"direction and up must not be \(0, 0, 0\)"),
        (Style(direction=(1.0, 2.0)), "direction is .* expected 3 numbers"),
        (Style(focus=(0.0, 1.0)), "focus is .* expected 6 numbers"),
        (Style(focus=(1.0, 0.0) * 3), "expected x min, x max"),
        (Style(focus=(90.0, 91.0) * 3), "nothing is there; x, y, z are "),
        (Style(max_cells=0), "max_cells is 0; expected at least 1"),
        (Style(clip="x=-1e9"), "nothing is left at clip='x=-1e9'"),
    ]:
        with pytest.raises(RenderError, match=said):
            plot_shards(parts, field="CpMeanTrim", style=style)
    solid = partition(cube(4), 2)
    with pytest.raises(RenderError, match="no cell is at x = 9"):
        plot_shards(solid, style=Style(slice="x=9"))
    with pytest.raises(RenderError, match="halo= cannot be drawn on a slice"):
        plot_shards(solid, halo=0, style=Style(slice="x"))
    for explode in (-1, float("nan"), 1e30, "2"):
        with pytest.raises(RenderError, match=r"explode is .* expected 0 to 1000"):
            plot_shards(parts, explode=explode)
    with pytest.raises(RenderError, match=r"p: .* too wide for a color bar; give clim="):
        scale_of(np.array([-1.7e308, 1.7e308]), "p")
    for name in ("a", "a.PNG", "a.html", "x.shards"):
        with pytest.raises(RenderError, match=rf"{name}: pictures are written as .png, "):
            view(parts, png=tmp_path / name)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ panels
def test_truth_and_prediction_share_colors_and_the_error_has_its_own(parts: Partition) -> None:
    true = parts.mesh.cell_fields["CpMeanTrim"].astype(float)
    size = (1500, 450)
    made = plot_prediction(parts, "CpMeanTrim", 0.5 * true, style=Style(size=size, off_screen=True))
    picture = made.screenshot(return_img=True)
    made.close()
    truth, found, error = (picture[60:360, x : x + 500].reshape(-1, 3) for x in (0, 500, 1000))
    shared, own = (
        np.asarray(Scale("", -m, m, cmap).table().values)[:, :3].astype(int)
        for m, cmap in ((1.835, "coolwarm"), (0.9177, "PuOr_r"))
    )
    for panel, table, other in ((truth, shared, own), (found, shared, own), (error, own, shared)):
        body = panel[panel.min(axis=1) < 240].astype(int)[::20]
        away = [np.abs(body[:, None] - t).max(axis=2).min(axis=1) for t in (table, other)]
        assert (away[0] <= 2).mean() > 0.8 > 0.5 > (away[1] <= 2).mean()
    assert shared[255].tolist() not in np.unique(found, axis=0).tolist()


@pytest.mark.parametrize("log", [False, True])
def test_predictions_of_vectors_clouds_and_meshes(mesh: Mesh, log: bool) -> None:
    field = mesh.cell_fields["wallShearStressMeanTrim"]
    plot_prediction(mesh, field, field * 1.1, log=log).close()
    cloud = Mesh(points=mesh.points, name="cloud")
    plot_prediction(cloud, cloud.points[:, 0], cloud.points[:, 0], log=log).close()
    with pytest.raises(RenderError, match=r"truth has shape \(9794,\), prediction \(9794, 3\)"):
        plot_prediction(mesh, "CpMeanTrim", field)
    with pytest.raises(RenderError, match="3 values cannot be drawn on 9,794 cells"):
        plot_prediction(mesh, "CpMeanTrim", np.zeros(3))
    masked = np.ma.masked_less(mesh.cell_fields["CpMeanTrim"], 0)
    wrong = {"masked": masked, "complex": field * 1j, "<U1": ["a"] * 9794, "int64": 3}
    for said, values in wrong.items():
        with pytest.raises(RenderError, match=f"values are .*{said}.*; expected a number for each"):
            plot_prediction(mesh, "CpMeanTrim", values)


def test_panels_have_one_camera(mesh: Mesh) -> None:
    values = mesh.cell_fields["CpMeanTrim"]
    scales = [scale_of(values, "Cp"), scale_of(values, "Cp", clim=(-1, 1))]
    made = plot_panels(mesh, [[Panel("a", values, s)] * 2 for s in scales], title="x")
    cameras = {id(made.renderers[made.renderers.loc_to_index((r, c))].camera)
               for r in (1, 3) for c in (0, 1)}  # fmt: skip
    assert len(cameras) == 1
    made.close()


# ------------------------------------------------------------------------------------------ charts
@pytest.mark.parametrize("k", [1, 8, 64])
def test_charts_are_valid_svg_with_every_shard(mesh: Mesh, k: int, tmp_path: Path) -> None:
    parts = partition(mesh, k)
    for chart, mark in ((plot_bars(parts), "rect"), (plot_rank_graph(parts), "circle")):
        root = ElementTree.fromstring(chart.text)
        marks = root.findall(f".//{{*}}{mark}")
        assert len(marks) >= k
        assert not re.search("nan|inf", chart.text)
        texts = {t.text for t in root.findall(".//{*}text")}
        assert {str(p) for p in range(k)} <= texts
        assert chart.save(tmp_path / "chart.svg").read_text() == chart._repr_svg_()


def test_predicted_coefficients_against_true_ones() -> None:
    true, found = np.array([0.25, 0.30, 0.41]), np.array([0.2505, 0.32, 0.41])
    chart = plot_agreement(true, found, band=1e-3)
    root = ElementTree.fromstring(chart.text)
    discs = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.findall("{*}circle")]
    x, y = np.array(discs).T
    slope, shift = np.polyfit(true, x, 1)
    np.testing.assert_allclose(x, slope * true + shift, atol=0.1)
    np.testing.assert_allclose(y[0] - y, slope * (found - found[0]), atol=0.15)
    texts = " ".join(t.text or "" for t in root.findall(".//{*}text"))
    assert "mean absolute error 0.00683, largest 0.02, 2 of 3 within ±0.001" in texts
    assert "0.30" in texts
    plot_agreement(true[:1], true[:1])
    with pytest.raises(RenderError, match="3 true and 2 predicted values"):
        plot_agreement(true, found[:2])


@pytest.mark.parametrize("n_points", [5, 9])
def test_numbers_of_links_do_not_hide_each_other(n_points: int) -> None:
    """All shards are linked, so that many lines cross."""
    linked = np.ones((n_points, n_points), int) - np.eye(n_points, dtype=int)
    what = Subject("x", "points", np.arange(n_points), [np.zeros(0, int)] * n_points,
                   12345 * linked, None)  # fmt: skip
    root = ElementTree.fromstring(plot_rank_graph(what).text)
    boxes = [
        np.array([float(box.get(side, "")) for side in ("x", "y", "width", "height")])
        for box in root.findall(".//{*}rect[@fill-opacity]")
    ]
    assert len(boxes) == n_points * (n_points - 1) / 2
    corners = np.array([[*box[:2], *(box[:2] + box[2:])] for box in boxes])
    low, high = corners[:, None, :2], corners[:, None, 2:]
    overlap = (np.minimum(high, corners[:, 2:]) > np.maximum(low, corners[:, :2])).all(axis=2)
    assert (overlap == np.eye(len(boxes), dtype=bool)).all()


# ------------------------------------------------------------------------------------------- files
def test_view_writes_a_picture_and_a_page(parts: Partition, tmp_path: Path) -> None:
    folder = parts.save(tmp_path / "s.shards")
    made = view(folder, png=tmp_path / "a.png", html=tmp_path / "a.html", explode=0.3)
    assert {p.name for p in made} == {"a.png", "a.html"}
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {p.name for p in tmp_path.iterdir()} >= {"a.png", "a.html"}
    assert not list(tmp_path.glob(".writing*"))
    page = (tmp_path / "a.html").read_text()
    assert not re.search(r"""<(script|link|img)[^>]*\b(src|href)\s*=""", page)
    assert "default-src 'unsafe-inline' 'unsafe-eval' data: blob:" in page
    assert "https://kitware.github.io/vtk-js/icon" not in page
    assert "9,794 cells in 8 shards" in page
    assert page.count('<input type="checkbox" checked data-shard=') == 8
    scene = zipfile.ZipFile(streams.BytesIO(base64.b64decode(longest_base64(page))))
    index = json.loads(scene.read("index.json"))
    window = index["scene"]
    (renderer,) = (d for d in window["dependencies"] if d["type"].endswith("Renderer"))
    actors = [d for d in renderer["dependencies"] if d["type"].endswith("Actor")]
    shards = json.loads(re.search(r"const shards = (\[.*?\]);", page)[1])
    assert len(shards) == len(actors)  # a body, a halo and two parts of each plate
    assert set(shards) == {-1, *range(8)}
    for url in re.findall(r"https?://[^\"'\s)>]*", page):  # in licenses and comments of vtk.js
        assert not re.search(r"""(src|href|url|fetch|import|open)\W{1,4}""" + re.escape(url), page)


def test_the_command_line_has_the_options_of_a_style(parts: Partition, tmp_path: Path) -> None:
    folder, png = parts.save(tmp_path / "s.shards"), tmp_path / "a.png"
    words = "--field CpMeanTrim --cmap PuOr --clim=-1,1 --unit - --view=0,-1,0 --zoom 2 --clip none"
    more = "--focus 0,1,0,1,0,1 --size 500x300"
    assert main(["view", str(folder), "--png", str(png), *f"{words} {more}".split()]) == 0
    import pyvista

    assert pyvista.read(png).dimensions[:2] == (500, 300)
    against = ["--field", "pMeanTrim", "--against", "CpMeanTrim", "--size", "900x300"]
    assert main(["view", str(folder), "--png", str(png), *against]) == 0
    assert pyvista.read(png).dimensions[:2] == (900, 300)
    assert main(["view", str(folder), "--png", str(png), "--against", "CpMeanTrim"]) == 2


@pytest.mark.parametrize(("option", "said"), [
    ("--clim=1", "'1'; expected 2 numbers"), ("--view=a,b,c", "expected 3 numbers"),
    ("--focus=1,2,3,4,5,nan", "expected 6 numbers"), ("--zoom=0", "expected a positive number"),
    ("--size=1e9x3", "expected pixels such as 1200x760"), ("--zoom=inf", "expected 1 number such"),
])  # fmt: skip
def test_options_of_a_style_are_checked(option: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["view", "x.shards", "--png", "a.png", option])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_colors_without_a_field_are_refused(capsys: Any) -> None:
    assert main(["view", "x.shards", "--png", "a.png", "--unit", "Pa", "--clim", "0,1"]) == 2
    assert "--clim and --unit: only fields have" in capsys.readouterr().err


def test_a_direction_of_any_length(parts: Partition) -> None:
    pictures = [shot(parts, style=Style(direction=(s, s, s))) for s in (1e-200, 1.0, 1e200)]
    assert all(np.array_equal(picture, pictures[1]) for picture in pictures)


def test_a_page_of_a_field_has_its_color_scale(parts: Partition, tmp_path: Path) -> None:
    view(parts, html=tmp_path / "a.html", field="pMeanTrim")
    page = (tmp_path / "a.html").read_text()
    assert "pMeanTrim" in page
    assert "linear-gradient(to top, rgb(" in page


def longest_base64(page: str) -> str:
    return max(re.findall(r'"([A-Za-z0-9+/=]{1000,})"', page), key=len)


def test_a_page_without_trame_vtk_is_a_render_error(
    parts: Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trame_vtk.tools.vtksz2html", None)
    with pytest.raises(RenderError, match=re.escape("pip install 'meshshard[html]'")):
        view(parts, html=tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


@pytest.mark.skipif(bool(os.environ.get("DISPLAY")), reason="there is a display")
def test_no_window_without_a_display(parts: Partition) -> None:
    with pytest.raises(RenderError, match="without a display"):
        view(parts, show=True)


def test_without_opengl_the_error_is_one_line(parts: Partition, tmp_path: Path) -> None:
    folder = parts.save(tmp_path / "s.shards")
    code = (
        "import sys; from meshshard.errors import RenderError; from meshshard.viz import view\n"
        f"try: view({str(folder)!r}, png={str(tmp_path / 'a.png')!r})\n"
        "except RenderError as error: sys.exit('one line: ' + str(error))"
    )
    environment = {**os.environ, "VTK_DEFAULT_OPENGL_WINDOW": "vtkXOpenGLRenderWindow"}
    environment["DISPLAY"] = ":987"  # no such display
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith("one line: cannot draw on this machine")
    assert "apt-get install libgl1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


# ------------------------------------------------------------------------------- PyVista, notebooks
def test_pyvista_meshes_have_the_accessor(mesh: Mesh) -> None:
    import pyvista

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    import_module(project["project"]["entry-points"]["pyvista.accessors"]["meshshard"])
    parts = pyvista.read(SURFACE).meshshard.partition(8)
    assert isinstance(parts, Partition)
    assert parts.k == 8
    blocks = pyvista.MultiBlock([pyvista.Sphere(), pyvista.Sphere(center=(2, 0, 0))])
    assert blocks.meshshard.mesh().n_cells == 2 * pyvista.Sphere().n_cells


def test_plot_shows_off_screen_too(parts: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyvista

    monkeypatch.setattr(pyvista, "OFF_SCREEN", True)
    parts.plot(explode=0.2, style=SMALL)


@pytest.mark.skipif(bool(os.environ.get("DISPLAY")), reason="there is a display")
def test_plot_without_a_display_warns_how_to_write_a_picture(parts: Partition) -> None:
    with pytest.warns(MeshWarning, match=r"without a display.*show\(screenshot='cut.png'\)"):
        parts.plot(style=SMALL)


def test_the_explorer_draws_what_its_controls_say(mesh: Mesh) -> None:
    made = meshshard.explore(mesh, 3, size=(400, 300))
    row, shown, _ = made.children
    parts, method, gap, halo, turn = row.children
    seen = [shown.value]
    for control, value in ((gap, 0.5), (method, "rcb"), (halo, 2), (parts, 5)):
        control.value = value
        assert shown.value.startswith('<img src="data:image/png;base64,')
        seen.append(shown.value)
    assert len(set(seen)) == len(seen)
    assert halo.value == "all shards"
    turn.value = True
    assert shown.value.startswith("<iframe srcdoc=")
    assert "9,794 cells in 5 shards" in shown.value
    ring = np.stack([np.roll(np.arange(60), 1), np.roll(np.arange(60), -1)], 1).ravel()
    nowhere = meshshard.explore(Graph(np.arange(0, 121, 2), ring, symmetric=True), 2)
    assert "a graph without positions cannot be drawn" in nowhere.children[2].value


def test_the_explorer_without_ipywidgets_is_a_render_error(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(RenderError, match=re.escape("pip install 'meshshard[jupyter]'")):
        meshshard.explore(mesh)


def test_tables_for_notebooks(mesh: Mesh, parts: Partition) -> None:
    table = mesh._repr_html_()
    for said in ("surface", "9,825", "quad", "pMeanTrim", "float32 × 3", "…"):
        assert said in table, said
    for html in (table, parts._repr_html_()):
        ElementTree.fromstring(f"<div>{html.replace('<br>', '<br/>')}</div>")
    assert "point cloud" in Mesh(points=np.zeros((0, 3)))._repr_html_()


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, suffix: str, mesh: Mesh
) -> None:
    """As on a full disk: half of the text is written."""
    path = tmp_path / f"a.{suffix}"
    path.write_text("old")
    parts = partition(mesh, 2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(StoreError, match=f"a.{suffix}: cannot be written"):
            plot_bars(parts).save(path) if suffix == "svg" else view(parts, html=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "old"
    assert not list(tmp_path.glob(".writing*"))
