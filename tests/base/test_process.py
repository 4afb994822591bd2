"""The process that trains: its threads, and what it does with freed memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from fedstrata.base.process import training_process

FAULTS = """
import resource
import torch
from fedstrata.base.process import prepare_process

prepare_process(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for turn in range(30):
    if turn == 10:
        before = faults()
    blocks = [torch.ones(1 << 18) for _ in range(4)]  # of a MiB, as activations are
    del blocks
print(faults() - before)
"""


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()

    def fails() -> None:
        with training_process(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.get_num_threads() == before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an allocator of glibc")
def test_freed_blocks_are_used_again_and_not_mapped_anew_unless_the_environment_says_otherwise() -> None:
    def page_faults(**environment: str) -> int:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        command = [sys.executable, "-c", FAULTS]
        run = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
        return int(run.stdout)

    # A MiB has 256 pages.
    assert page_faults() < 256
    assert page_faults(MALLOC_MMAP_THRESHOLD_="65536") > 20 * 4 * 250
