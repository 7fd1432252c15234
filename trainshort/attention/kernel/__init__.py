"""The compiled kernel of `windowed` and `compiled`: C sources, the build on first use, and the calls through ctypes.

vector.h   eight floats at a time            centres.h   vectors that keys lie close to
tile.h     the three matrix products         bound.h     what far keys can weigh at most
call.h     what a call is given              forward.h   nearest block first, stop when the bound says so
panel.h    query rows in lanes               backward.h  the same blocks again
pool.h     work for torch's own threads      decode.h    a few rows against a long past
                                             windowed.c  entry points
"""

from trainshort.attention.kernel.build import KernelBuildError
from trainshort.attention.kernel.library import Problem, backward, forward, unavailable

__all__ = ["KernelBuildError", "Problem", "backward", "forward", "unavailable"]
