"""The folders of an OpenFOAM case: is the case, or are its pieces per processor, to be read?"""

from __future__ import annotations

from pathlib import Path

from meshshard.errors import ReadError

__all__ = ["is_decomposed"]


def is_decomposed(marker: Path, time: float | None) -> bool:
    """Whether only the folders processor0, processor1, … hold the requested results.

    Args:
        marker: the .foam file in the folder of the case.
        time: the requested time; None if the processors' times that the case lacks are wanted.

    Raises:
        ReadError: the results are in the collated format, which VTK does not read.
    """
    case = marker.parent
    own = _times(case)
    if time in own:
        return False
    folders = [folder for folder in case.glob("processor*") if folder.is_dir()]
    new = {t for folder in folders for t in _times(folder)} - own
    if not new or (time is not None and time not in new):
        return False
    if not (case / "processor0").is_dir():
        raise ReadError(f"{marker}: results are collated in {folders[0].name}; run reconstructPar")
    return True


def _times(folder: Path) -> set[float]:
    """Times of the folders whose names are numbers."""
    found = set()
    for child in folder.iterdir():
        try:
            found.add(float(child.name))
        except ValueError:
            continue
    return found
