"""Rows -> groups -> batches -> parts: nothing is lost, and a pass stays as small as it should.

python -m pytest tests/unit/test_prefix_batches.py
"""

from hypothesis import given
from hypothesis import strategies as st

from nanocodes.prefix_batches import (
    PASS_TOKENS,
    Batch,
    Group,
    Member,
    common_length,
    even_parts,
    make_batches,
    share_prefixes,
)

# Few ids, so that rows often begin alike.
rows_of_few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=30).map(tuple)


@given(st.sets(rows_of_few_ids, min_size=1, max_size=40), st.sampled_from([1, 40, 400]))
def test_every_row_is_read_once_in_passes_of_bounded_size(rows, batch_tokens):
    batches = make_batches(share_prefixes(rows, batch_tokens), batch_tokens)
    read = []
    for batch in batches:
        assert batch.row_count == sum(len(group.rows) for group in batch.groups)
        assert batch.longest == max(group.longest for group in batch.groups)
        assert batch.lost <= PASS_TOKENS
        assert batch.row_count * batch.longest <= batch_tokens or batch.row_count == 1
        for group in batch.groups:
            prefixes = {row[: batch.shared] for row in group.rows}
            assert len(prefixes) == 1
            assert all(len(row) > batch.shared for row in group.rows)
        for part in even_parts(batch):
            lengths = [len(member.row) - batch.shared for member in part]
            assert max(lengths) * len(part) - sum(lengths) <= PASS_TOKENS
            for member in part:
                assert member.row in batch.groups[member.group].rows
                read.append(member.row)
    assert sorted(read) == sorted(rows)


def test_common_length():
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_length((1, 2), (1, 2, 3)) == 2
    assert common_length((1,), (2,)) == common_length((), (1,)) == 0


def test_choices_of_a_question_become_one_group():
    question = tuple(range(10))
    choices = [(*question, choice, 7) for choice in (20, 21, 22)]
    assert share_prefixes([choices[2], choices[0], choices[1]], 1000) == [Group(10, choices)]


def test_rows_that_share_less_than_a_third_stay_apart():
    short = (1, 2, 3)
    assert share_prefixes([(*short, 4, 5, 6, 7, 8, 9), (*short, 5, 6, 7, 8, 9, 9)], 1000) == [
        Group(3, [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 6, 7, 8, 9, 9)])
    ]
    apart = share_prefixes([(*short, 4, 5, 6, 7, 8, 9, 10), (*short, 5, 6, 7, 8, 9, 9, 9)], 1000)
    assert [group.shared for group in apart] == [0, 0]


def test_group_has_at_most_batch_tokens():
    rows = [(1, 2, 3, choice) for choice in range(6)]
    assert [len(group.rows) for group in share_prefixes(rows, 12)] == [3, 3]


def test_last_id_of_a_row_is_never_shared():
    assert share_prefixes([(1, 2, 3), (1, 2, 3, 4)], 1000) == [Group(2, [(1, 2, 3), (1, 2, 3, 4)])]


def test_batch_is_closed_where_its_groups_would_lose_too_much():
    long = Group(9, [(*range(9), choice) for choice in (20, 21, 22)])
    like = Group(8, [(*range(8), choice) for choice in (20, 21)])
    alone = Group(0, [(5,)])
    assert make_batches([alone, like, long], 1000) == [
        Batch([long, like], shared=8, row_count=5, longest=10, lost=2),
        Batch([alone], shared=0, row_count=1, longest=1),
    ]
    assert len(make_batches([alone, like, long], 1)) == 3


def test_what_groups_lose_adds_up():
    def group(shared, choices):
        return Group(shared, [(*range(shared), 30 + choice) for choice in range(choices)])

    batches = make_batches([group(20, 3), group(14, 2), group(11, 2)], 1000)
    assert [(batch.shared, batch.lost) for batch in batches] == [(14, 12), (11, 0)]


def test_rows_of_unlike_length_are_read_apart():
    rows = [tuple(range(length)) for length in (40, 39, 10, 9)]
    batch = Batch([Group(0, [row]) for row in rows], shared=0, row_count=4, longest=40)
    assert even_parts(batch) == [
        [Member(rows[0], 0), Member(rows[1], 1)],
        [Member(rows[2], 2), Member(rows[3], 3)],
    ]
