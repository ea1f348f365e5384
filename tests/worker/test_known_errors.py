"""Errors of CUDA, NCCL and Triton, as their libraries write them: what a trial makes of each."""

import signal

import pytest
import torch
import torch.distributed as dist

from longseq_bench.launchers.exit_status import (
    failed_by_device,
    may_be_out_of_memory,
    outcome_of_exit,
)
from longseq_bench.worker.verdicts import outcome_of_exception

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
UNHANDLED = NCCL + "unhandled cuda error, NCCL version 2.27.5\nLast error:\n"
DUPLICATE = NCCL + "invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on "
SEARCH = "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda for more"
NO_ROOM = (
    NCCL + "unhandled system error, NCCL version 2.27.5\nncclSystemError: System call (e.g. "
    "socket, malloc) or external library call failed or device error.\nLast error:\n"
    "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216)"
)
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update"
TOO_LARGE = "NotImplementedError: 64-bit indexing is not yet implemented for triton templates"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory" + SEARCH),
        RuntimeError("CUDA driver error: out of memory"),
        dist.DistBackendError(UNHANDLED + "Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_every_lack_of_memory_is_out_of_memory(error: Exception) -> None:
    """Any other status would end a search at this length."""
    found = outcome_of_exception(error, "forward")
    assert (found.status, found.phase, found.fits) == ("oom", "forward", False)
    assert not failed_by_device(found)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: invalid argument"),
        dist.DistBackendError(UNHANDLED + "Cuda failure 1 'invalid argument'"),
        dist.DistBackendError(NCCL + "unhandled system error"),
        dist.DistBackendError(NO_ROOM + ", error: Permission denied (13)"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=str,
)
def test_other_errors_of_a_device_are_for_a_fresh_process(error: Exception) -> None:
    """Not `limit`, and no reason to try with more memory."""
    found = outcome_of_exception(error, "forward")
    assert (found.status, failed_by_device(found)) == ("error", True)
    assert not may_be_out_of_memory(found, 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("CUDA error: uncorrectable ECC error encountered" + SEARCH, "memory error"),
        ("NVMLError: GPU is lost", "the driver has lost the GPU"),
        ("GPU 0000:3B:00.0: GPU has fallen off the bus.", "the driver has lost the GPU"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=7", "the driver has lost the GPU"),
    ],
)
def test_a_broken_gpu_is_one_sentence(text: str, problem: str) -> None:
    """It fails this trial, after a second process; the next one runs."""
    raised = outcome_of_exception(torch.AcceleratorError(text), "forward")
    aborted = outcome_of_exit(-signal.SIGABRT, "forward", f"what():  {text}\n", False)
    for found, status in ((raised, "error"), (aborted, "crashed")):
        assert (found.status, found.phase, failed_by_device(found)) == (status, "forward", True)
        assert problem in (found.reason or "")
        assert (found.reason or "").endswith("and reset it or reboot")
        assert not may_be_out_of_memory(found, signal.SIGABRT)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("InductorError: LoweringException: " + TOO_LARGE),
        NotImplementedError(TOO_LARGE),
    ],
    ids=str,
)
def test_limits_of_kernels(error: Exception) -> None:
    assert outcome_of_exception(error, "forward").status == "limit"


def test_a_tile_that_does_not_fit_the_device_is_a_limit_and_other_errors_are_not() -> None:
    """Triton raises it at the launch; torch.compile repeats its text when it raises its own."""
    errors = pytest.importorskip("triton.runtime.errors")
    error = errors.OutOfResources(270336, 232448, "shared memory")
    found = outcome_of_exception(error, "backward")
    assert (found.status, found.phase, found.facts) == ("limit", "backward", {})
    assert "shared memory, Required: 270336, Hardware limit: 232448" in (found.reason or "")
    wrapped = RuntimeError(f"No valid triton configs. OutOfResources: {error}")
    assert outcome_of_exception(wrapped, "backward").status == "limit"
    found = outcome_of_exception(errors.PTXASError("`ptxas` failed with error code 255"), "forward")
    assert (found.status, found.reason) == (
        "error", "PTXASError: PTXAS error: `ptxas` failed with error code 255",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "problem", "remedy"),
    [
        (RuntimeError, "Found no NVIDIA driver on your system.", "no NVIDIA driver", "install"),
        (RuntimeError, TOO_OLD, "too old for this torch", "update the driver"),
        (RuntimeError, "No CUDA GPUs are available", "finds no GPU", "CUDA_VISIBLE_DEVICES"),
        (AssertionError, "Torch not compiled with CUDA enabled", "CPU build", "install a torch"),
        (torch.AcceleratorError, "CUDA error: no kernel image is available for execution on the",
         "this GPU's architecture has no code", "install a build for this GPU"),
        (dist.DistBackendError, DUPLICATE + "CUDA device 4000", "two ranks have the same GPU",
         "use fewer ranks"),
        (dist.DistBackendError, NO_ROOM + ", error: No space left on device (28)",
         "NCCL finds no room in /dev/shm", "docker run --shm-size=8g, or --ipc=host"),
        (RuntimeError, "Failed to find C compiler. Please specify via CC environment variable",
         "Triton needs a C compiler", "install gcc"),
        (RuntimeError, "LoweringException: NoValidChoicesError: No choices to select",
         "no tile for FlexAttention", "a multiple of 128"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_missing_is_named_with_a_remedy(
    kind: type[Exception], text: str, problem: str, remedy: str
) -> None:
    found = outcome_of_exception(kind(text), "start")
    assert found.status == "unsupported"
    assert problem in (found.reason or "")
    assert remedy in (found.reason or "")
    assert "\n" not in (found.reason or "")
    # the words of the library are kept, without the middle of a long text
    text = " ".join(text.split())
    start, _, end = found.facts["exception"].partition("…")
    assert text.startswith(start)
    assert text.endswith(end)
    assert not failed_by_device(found)
