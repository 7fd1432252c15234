"""The compiled kernel of the `windowed` engine: C sources, the build on first use, and the calls through ctypes.

vector.h   eight floats at a time            bound.h     what far keys can weigh at most
tile.h     the three matrix products         forward.h   nearest block first, stop when the bound says so
call.h     what a call is given              backward.h  the same blocks again
panel.h    query rows in lanes               decode.h    a few rows against a long past
pool.h     work for torch's own threads      windowed.c  entry points
"""

from trainshort.attention.kernel.build import KernelBuildError
from trainshort.attention.kernel.library import Problem, backward, forward, unavailable

__all__ = ["KernelBuildError", "Problem", "backward", "forward", "unavailable"]
