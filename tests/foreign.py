"""Small files of the formats that VTK and meshio read, written as their descriptions say."""

import itertools

import h5py
import numpy as np
import pyvista as pv

SIDES = (  # corners of the six faces of a hexahedron by (x, y, z) offsets, normals outward
    ((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)), ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)),
    ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)), ((0, 1, 0), (0, 1, 1), (1, 1, 1), (1, 1, 0)),
    ((0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)), ((0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)),
)  # fmt: skip


def hexahedra(n):
    """A row of n hexahedra along x as a VTK grid."""
    voxels = pv.ImageData(dimensions=(n + 1, 2, 2)).cast_to_unstructured_grid()
    cells = voxels.cells.reshape(-1, 9)[:, 1:]
    if voxels.celltypes[0] == 11:
        cells = cells[:, [0, 1, 3, 2, 4, 5, 7, 6]]
    cells = np.column_stack([np.full(n, 8), cells]).ravel()
    return pv.UnstructuredGrid(cells, np.full(n, 12, np.uint8), np.asarray(voxels.points, float))


def foam_file(path, kind, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"FoamFile {{ version 2.0; format ascii; class {kind}; object {path.name}; }}\n"
    path.write_text(head + body)


def foam_list(lines):
    return f"{len(lines)}\n(\n" + "\n".join(map(str, lines)) + "\n)\n"


def foam_mesh(case, first, last):
    """The mesh of an OpenFOAM case: the hexahedra first:last of a row along x."""
    points = list(itertools.product(range(first, last + 1), (0, 1), (0, 1)))
    faces: dict = {}
    for cell, side in itertools.product(range(last - first), SIDES):
        corners = [points.index((first + cell + x, y, z)) for x, y, z in side]
        faces.setdefault(tuple(sorted(corners)), []).append((corners, cell))
    inner = [uses for uses in faces.values() if len(uses) == 2]
    outer = [uses for uses in faces.values() if len(uses) == 1]
    mesh = case / "constant" / "polyMesh"
    foam_file(mesh / "points", "vectorField", foam_list([f"({x} {y} {z})" for x, y, z in points]))
    corners = [uses[0][0] for uses in inner + outer]
    text = foam_list([f"4({' '.join(map(str, c))})" for c in corners])
    foam_file(mesh / "faces", "faceList", text)
    foam_file(mesh / "owner", "labelList", foam_list([uses[0][1] for uses in inner + outer]))
    foam_file(mesh / "neighbour", "labelList", foam_list([uses[1][1] for uses in inner]))
    patch = f"walls {{ type wall; nFaces {len(outer)}; startFace {len(inner)}; }}"
    foam_file(mesh / "boundary", "polyBoundaryMesh", foam_list([patch]))


def foam_field(path, values):
    body = (
        "dimensions [0 2 -2 0 0 0 0];\ninternalField nonuniform List<scalar>\n"
        f"{foam_list(values)};\nboundaryField {{ walls {{ type zeroGradient; }} }}\n"
    )
    foam_file(path, "volScalarField", body)


def foam_case(folder, *, pieces=(), serial=(), n=4):
    """A case of n cells with p = 100 time + cell; `pieces` and `serial` are times."""
    (folder / "case.foam").parent.mkdir(parents=True, exist_ok=True)
    (folder / "case.foam").touch()
    control = "application simpleFoam; startTime 0; endTime 9; deltaT 1; writeInterval 1;\n"
    foam_file(folder / "system" / "controlDict", "dictionary", control)
    parts = [(folder, 0, n, serial)] if serial else []
    if pieces:
        parts += [(folder / f"processor{i}", 2 * i, 2 * i + 2, pieces) for i in range(n // 2)]
    for case, first, last, times in parts:
        foam_mesh(case, first, last)
        for time in times:
            foam_field(case / f"{time}" / "p", [100 * time + i for i in range(first, last)])
    return folder / "case.foam"


def hdf_grid(group, steps):
    """Two hexahedra with p; in step t of several p = 100 t + cell, at time t / 2."""
    grid = hexahedra(2)
    group.attrs["Version"] = np.array([2, 3])
    group.attrs.create("Type", np.bytes_("UnstructuredGrid"))
    group["Points"] = grid.points
    group["Connectivity"] = grid.cell_connectivity
    group["Offsets"], group["Types"] = grid.cell_offsets, grid.celltypes
    for name, count in (("Points", 12), ("Cells", 2), ("ConnectivityIds", 16)):
        group[f"NumberOf{name}"] = np.array([count])
    times = np.arange(max(steps, 1))
    group["CellData/p"] = (100.0 * times[:, None] + np.arange(2)).ravel()
    if steps:
        group.create_group("Steps").attrs["NSteps"] = steps
        group["Steps/Values"], group["Steps/NumberOfParts"] = times / 2, np.ones(steps, int)
        for name in ("Part", "Point"):
            group[f"Steps/{name}Offsets"] = np.zeros(steps, int)
        for name in ("Cell", "ConnectivityId"):
            group[f"Steps/{name}Offsets"] = np.zeros((steps, 1), int)
        group["Steps/CellDataOffsets/p"] = times * 2


def vtkhdf(path, **blocks):
    """A VTKHDF file of one grid, or of several named blocks; values are numbers of time steps."""
    with h5py.File(path, "w") as file:
        root = file.create_group("VTKHDF", track_order=True)
        if list(blocks) == ["grid"]:
            hdf_grid(root, blocks["grid"])
            return path
        root.attrs["Version"] = np.array([2, 3])
        root.attrs.create("Type", np.bytes_("PartitionedDataSetCollection"))
        assembly = root.create_group("Assembly", track_order=True)
        for i, (name, steps) in enumerate(blocks.items()):
            block = root.create_group(name, track_order=True)
            hdf_grid(block, steps)
            block.attrs["Index"] = i
            assembly.create_group(name, track_order=True)[name] = h5py.SoftLink(f"/VTKHDF/{name}")
    return path


def ensight_text(items, binary):
    """Lines of EnSight Gold: words, integers and float arrays, as text or in C binary."""
    if not binary:
        rows = (
            [item] if isinstance(item, str)
            else ["".join(f"{i:10d}" for i in np.atleast_1d(item))] if np.asarray(item).dtype == int
            else [f"{value:12.5e}" for value in item]
            for item in items
        )  # fmt: skip
        return "".join(f"{row}\n" for of_item in rows for row in of_item).encode()
    return b"".join(
        item.encode().ljust(80) if isinstance(item, str)
        else np.asarray(item, "i4" if np.asarray(item).dtype == int else "f4").tobytes()
        for item in items
    )  # fmt: skip


def ensight_values(path, *parts, binary=False):
    """A variable file of EnSight Gold: the values of each part, component by component."""
    items = [path.stem]
    for number, values in enumerate(parts, 1):
        items += ["part", number, "hexa8", np.transpose(values).astype(float).ravel()]
    path.write_bytes(ensight_text(items, binary))


def ensight(folder, variables, times="", binary=False):
    """A case of one part of two hexahedra."""
    grid = hexahedra(2)
    cells = 1 + grid.cell_connectivity.reshape(2, 8).astype(int)
    items = ["C Binary"] if binary else []
    items += ["geometry", "-", "node id assign", "element id assign", "part", 1, "fluid"]
    items += ["coordinates", 12, grid.points.T.ravel(), "hexa8", 2, *cells]
    (folder / "grid.geo").write_bytes(ensight_text(items, binary))
    head = "FORMAT\ntype: ensight gold\nGEOMETRY\nmodel: grid.geo\nVARIABLE\n"
    (folder / "a.case").write_text(f"{head}{variables}\n{times}")
    return folder / "a.case"


def gmsh(path, lines=(1, 1), triangles=((5,), (5,))):
    """Gmsh 4.1: two lines and two triangles, each an entity in the given physical groups."""
    groups = [[g] if g else [] for g in lines]
    entities = [
        f"{1 + i} 0 0 0 1 1 0 {len(g)} {' '.join(map(str, g))} 0"
        for of_dim in (groups, triangles)
        for i, g in enumerate(of_dim)
    ]
    points = ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0))
    path.write_text("\n".join([
        "$MeshFormat", "4.1 0 8", "$EndMeshFormat",
        "$Entities", "0 2 2 0", *entities, "$EndEntities",
        "$Nodes", "1 4 1 4", "2 1 0 4", "1", "2", "3", "4",
        *(f"{x} {y} {z}" for x, y, z in points), "$EndNodes",
        "$Elements", "4 4 1 4", "1 1 1 1", "1 1 2", "1 2 1 1", "2 2 3",
        "2 1 2 1", "3 1 2 3", "2 2 2 1", "4 1 3 4", "$EndElements", "",
    ]))  # fmt: skip
    return path


def xdmf(path, attributes, include="//Grid[@Name='mesh']"):
    """XDMF as DOLFINx writes it: a mesh of two triangles, and fields at times that include it."""
    mesh = (
        '<Topology TopologyType="Triangle" NumberOfElements="2"><DataItem Dimensions="2 3" '
        'NumberType="Int" Format="XML">0 1 2 0 2 3</DataItem></Topology>'
        '<Geometry GeometryType="XYZ"><DataItem Dimensions="4 3" Format="XML">'
        "0 0 0 1 0 0 1 1 0 0 1 0</DataItem></Geometry>"
    )
    pointer, series = f"xpointer({include}/*[self::Topology or self::Geometry])", ""
    for name, values_at in attributes.items():
        grids = (
            f'<Grid><xi:include xpointer="{pointer}"/>'
            f'<Time Value="{t}"/><Attribute Name="{name}" Center="Cell"><DataItem Dimensions="2 1" '
            f'Format="XML">{values}</DataItem></Attribute></Grid>'
            for t, values in values_at.items()
        )
        series += f'<Grid GridType="Collection" CollectionType="Temporal">{"".join(grids)}</Grid>'
    path.write_text(
        '<Xdmf xmlns:xi="https://www.w3.org/2001/XInclude"><Domain>'
        f'<Grid Name="mesh" GridType="Uniform">{mesh}</Grid>{series}</Domain></Xdmf>'
    )
    return path
