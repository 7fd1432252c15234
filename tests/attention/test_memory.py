"""Peak memory of ALiBi attention, forward and backward, against plain causal attention: each in its own process."""

import subprocess
import sys

import pytest
from kernel_helpers import needs_kernel

SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from trainshort import alibi_attention

torch.set_num_threads(1)
attention = {"plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), "alibi": alibi_attention}

def peak(length):
    q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 8, length, 64)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    attention[sys.argv[1]](q, k, v).backward(grad)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) - before

peak(128)  # what is loaded once is not counted
print(peak(4096))
"""


def peak_kilobytes(attention: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, attention], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark from /proc")
def test_alibi_needs_no_more_memory_than_no_positions():
    """4,096 tokens, 8 heads × 64: a written-out bias would take 537 MB more."""
    assert peak_kilobytes("alibi") <= 1.10 * peak_kilobytes("plain")
