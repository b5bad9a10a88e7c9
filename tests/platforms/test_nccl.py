"""Whether NCCL can order its launches, from what a process says of itself."""

from pathlib import Path

import pytest

from kvpp_connect.platforms.nccl import nccl_problem

TORCHS = "7f01 r-xp 00000000 08:01 12 /env/nvidia/nccl/lib/libnccl.so.2"
ANOTHER = "7f02 r--p 00001000 08:01 13 /usr/lib/x86_64-linux-gnu/libnccl.so.2.22.3"
OTHERS = "7f03 r--p 00000000 08:01 14 /env/lib/libnccl-net.so\n7f04 rw-p 00000000 00:00 0"


def test_one_library_that_is_new_enough_is_right():
    assert nccl_problem((2, 26, 2), "\n".join([TORCHS, OTHERS, TORCHS])) == ""
    assert nccl_problem((2, 30), "") == ""
    assert nccl_problem((3, 0), Path("/proc/self/maps").read_text()) == ""


@pytest.mark.parametrize(("version", "said"), [((2, 25, 1), "2.25.1"), ((1, 99), "1.99")])
def test_an_older_one_is_refused(version, said):
    assert f"NCCL is {said}; only 2.26 and newer" in nccl_problem(version, TORCHS)


def test_torch_without_one_is_refused():
    assert "NCCL is absent" in nccl_problem((), "")


def test_two_of_them_in_one_process_are_refused_by_their_paths():
    problem = nccl_problem((2, 28), f"{TORCHS}\n{ANOTHER}\n{ANOTHER}\n")
    assert "2 NCCL libraries (/env/nvidia/nccl/lib/libnccl.so.2, /usr/lib/" in problem
    assert "Unset VLLM_NCCL_SO_PATH" in problem
