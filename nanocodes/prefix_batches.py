"""Which rows of token ids a model reads together, so that what they share is read once.

Scoring a benchmark means reading many rows that begin alike: the choices of a question, questions
after the same examples. Three steps, none of which touches a model:

    rows -> share_prefixes -> groups -> make_batches -> batches -> even_parts -> parts

A group's rows share a prefix. A batch's groups have their prefixes read in one forward pass, and
the rests of their rows in one pass for each part. A row is a tuple of ids.
"""

from dataclasses import dataclass

PASS_TOKENS = 16  # a forward pass takes about as long as this many tokens more


@dataclass
class Group:
    """Rows that begin alike."""

    shared: int  # how many ids from the first on all rows share, 0 for a row on its own
    rows: list

    @property
    def longest(self):
        return max(len(row) for row in self.rows)


@dataclass
class Batch:
    """Groups that are read together."""

    groups: list
    shared: int  # how many ids of each group are read once: as many as every group shares
    row_count: int
    longest: int  # the length of the longest row
    lost: int = 0  # how many ids more are read than if each group used all that its rows share


@dataclass(frozen=True)
class Member:
    """A row and the number of its group in the batch."""

    row: tuple
    group: int


def common_length(a, b):
    """How many ids two rows share from the first on."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def share_prefixes(rows, batch_tokens):
    """Put rows that begin alike into one Group, of at most batch_tokens padded ids.

    A row joins a group of which it shares at least a third of its own ids, its last one left out.
    """
    groups = []
    for row in sorted(rows):  # so that rows that begin alike are neighbours
        if groups:
            group = groups[-1]
            shared = min(group.shared, common_length(group.rows[-1], row))
            tokens = (len(group.rows) + 1) * max(group.longest, len(row))
            if 3 * shared >= len(row) and tokens <= batch_tokens:
                group.shared = shared
                group.rows.append(row)
                continue
        groups.append(Group(len(row) - 1, [row]))
    for group in groups:
        if len(group.rows) == 1:
            group.shared = 0
    return groups


def make_batches(groups, batch_tokens):
    """Put groups together into a Batch, those that share most first.

    In a batch all groups share only as much as the one that shares least. What the others lose by
    that is at most PASS_TOKENS, and a batch has at most batch_tokens padded ids, unless it is one
    group.
    """
    batches = []
    for group in sorted(groups, key=lambda group: (group.shared, group.longest), reverse=True):
        if batches:
            batch = batches[-1]
            row_count = batch.row_count + len(group.rows)
            longest = max(batch.longest, group.longest)
            # Of each group all rows but one gain by what is shared, and the new one shares least.
            gaining = batch.row_count - len(batch.groups)
            lost = batch.lost + gaining * (batch.shared - group.shared)
            if lost <= PASS_TOKENS and row_count * longest <= batch_tokens:
                batch.groups.append(group)
                batches[-1] = Batch(batch.groups, group.shared, row_count, longest, lost)
                continue
        batches.append(Batch([group], group.shared, len(group.rows), group.longest))
    return batches


def even_parts(batch):
    """Cut a batch's rows into parts, lists of Members, the longest rows first.

    The rows of a part are read in one pass, each from the batch's shared ids on. They are padded to
    the longest of them, with at most PASS_TOKENS ids of padding.
    """
    members = [Member(row, i) for i, group in enumerate(batch.groups) for row in group.rows]
    parts = []
    tokens = 0  # of the last part, without padding
    for member in sorted(members, key=lambda member: len(member.row), reverse=True):
        length = len(member.row) - batch.shared
        if parts:
            longest = len(parts[-1][0].row) - batch.shared
            padding = (len(parts[-1]) + 1) * longest - (tokens + length)
            if padding <= PASS_TOKENS:
                parts[-1].append(member)
                tokens += length
                continue
        parts.append([member])
        tokens = length
    return parts
