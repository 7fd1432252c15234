"""Marks for tests of compiled code: they are skipped, with the reason, where it cannot be built (`make test-bare`)."""

import pytest

from trainshort.attention.kernel import unavailable

needs_kernel = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
both = pytest.mark.parametrize("implementation", [pytest.param("compiled", marks=needs_kernel), "torch"])
