"""Pages and pictures that are made from the code say what the code is."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_picture_of_the_imports_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / "docs" / "draw_house.py")
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    assert house.PICTURE.read_text(encoding="utf-8") == house.draw(), "run docs/draw_house.py"
