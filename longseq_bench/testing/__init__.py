"""The contract test of implementations, for pytest; plug-ins run it on their own.

A complete test module of a plug-in that registers `my-attention`:

    from longseq_bench.testing import ImplementationContract

    class TestMyAttention(ImplementationContract):
        cases = [
            ("my-attention", {}),
            ("my-attention", {"chunk": 33}),
        ]

        def test_longer_than_a_tile(self, implementation, options):
            super().test_longer_than_a_tile(implementation, options)  # or skip, with the reason

`definition` has attention in float64, built from `Attention.multiplicity` alone.
"""

import pytest

pytest.register_assert_rewrite("longseq_bench.testing.contract")

from longseq_bench.testing.contract import ImplementationContract  # noqa: E402

__all__ = ["ImplementationContract"]
