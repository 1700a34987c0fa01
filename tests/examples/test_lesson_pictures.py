"""Every lesson's picture exists, is small, and agrees with the lesson's current drawing."""

import draw
import lesson_tools
import numpy as np
import pytest
from matplotlib.image import imread

MOST = 40_000  # largest size of a picture in bytes
# Mean difference of pixels from 0 to 1; other versions of matplotlib may place letters differently.
TOLERANCE = 0.02


@pytest.mark.parametrize("stem", lesson_tools.LESSONS)
def test_picture_is_small_and_has_a_caption(stem):
    assert 2_000 < (lesson_tools.PICTURES / f"{stem}.png").stat().st_size <= MOST
    text = lesson_tools.LESSONS[stem].read_text()
    caption = text.split("def draw(figure: Any) -> None:\n")[1].split('"""')[1]
    assert caption.endswith(".")
    assert "\n" not in caption


def test_every_picture_belongs_to_a_lesson():
    assert sorted(path.stem for path in lesson_tools.PICTURES.iterdir()) == list(lesson_tools.LESSONS)


@pytest.mark.parametrize(
    "stem", [stem if stem == "07_tanh" else pytest.param(stem, marks=pytest.mark.slow) for stem in lesson_tools.LESSONS]
)
def test_picture_matches_the_drawing_of_the_lesson(stem, tmp_path):
    path = tmp_path / "picture.png"
    draw.save_picture(lesson_tools.load(lesson_tools.LESSONS[stem]), path)
    today, kept = imread(path), imread(lesson_tools.PICTURES / f"{stem}.png")
    assert today.shape == kept.shape
    assert np.abs(today - kept).mean() < TOLERANCE
