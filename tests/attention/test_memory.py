"""Test of the peak memory of ALiBi attention, compared with causal attention without positions."""

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

def peak_kilobytes(length):
    q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 8, length, 64)
    pages_before = int(Path("/proc/self/statm").read_text().split()[1])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    attention[sys.argv[1]](q, k, v).backward(grad)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) - 4 * pages_before

peak_kilobytes(128)  # loads all libraries, so that their memory is not counted
print(peak_kilobytes(4096))
"""


def peak_kilobytes(attention: str) -> int:
    """Return the peak memory of a forward and a backward pass over 4,096 tokens in a new process."""
    process = subprocess.run([sys.executable, "-c", SCRIPT, attention], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_alibi_needs_no_more_memory_than_attention_without_positions():
    # A bias tensor for 4,096 tokens and 8 heads would have 537 MB.
    assert peak_kilobytes("alibi") <= 1.10 * peak_kilobytes("plain")
