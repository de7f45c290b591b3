"""One rank; several are in tests/claims/test_ranks.py.

python -m pytest tests/unit/test_ranks.py
"""

import pytest
import torch

from nanocodes.ranks import from_rank_0, join_ranks, leave_ranks, rank_and_world


def test_without_torchrun_there_is_one_rank():
    assert join_ranks(torch.device("cpu")) == rank_and_world() == (0, 1)
    leave_ranks()


def test_on_one_rank_a_function_is_only_called():
    assert from_rank_0(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        from_rank_0(divmod, 7, 0)
