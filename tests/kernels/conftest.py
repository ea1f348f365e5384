"""The process in which tests of this folder run Triton's kernels without a GPU."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.kernels.triton_interpreter import LIMIT_S, Interpreted, interpret


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """`interpreted(function, *arguments)` calls a function of a module in Triton's interpreter.

    It is another process, because the interpreter has to be chosen before triton is imported.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, interpret) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(LIMIT_S)
