"""A picture of the load of all experts: a row a layer, a column an expert."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

_Picture = npt.NDArray[np.uint8]

# From half the even load and less, over the even load, to its double and more.
_COLOURS = np.array([[33, 102, 172], [247, 247, 247], [178, 24, 43]], dtype=np.float64)
_DEAD, _NOTHING = (0, 0, 0), (128, 128, 128)
_WIDTH = 768  # of the picture at least, in pixels, so that it can be read without zooming


def heat_map(loads: Sequence[Tensor]) -> _Picture:
    """Draw the load of experts.

    White is the even load, blue less (to half of it), red more (to twice of it), by its logarithm; black is an expert
    without tokens, grey a layer without any, and the rest of a layer that has fewer experts than the widest.

    Args:
        loads: For each layer ``[E]`` integer choices of each expert, on the host.

    Returns:
        ``[height, width, 3]`` RGB; the first layer is on top.
    """
    columns = max(len(load) for load in loads)
    cells = np.empty((len(loads), columns, 3), dtype=np.uint8)
    cells[:] = _NOTHING
    for row, load in enumerate(loads):
        counts = load.numpy().astype(np.float64)
        if counts.sum() > 0:
            cells[row, : len(counts)] = _colours(counts / counts.mean())
    size = max(4, -(-_WIDTH // columns))
    return cells.repeat(size, axis=0).repeat(size, axis=1)


def _colours(times_even: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        place = np.log2(times_even).clip(-1, 1) + 1
    colours = np.stack([np.interp(place, range(len(_COLOURS)), channel) for channel in _COLOURS.T], axis=-1)
    colours[times_even == 0] = _DEAD
    return colours.round()
