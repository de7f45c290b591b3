"""The codes and their algebra over GF(2). Run with: python -m pytest tests/unit/test_codes.py"""

import itertools

import numpy as np
import pytest
from helpers import refused_main, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

import codes
from codes import (
    LinearCode,
    binary_codes,
    code_table,
    gf2_inverse,
    gf2_rank,
    ids_from_codes,
    invertible_matrix,
    matrix_from_hex,
    matrix_to_hex,
    random_matrix,
    recode,
)

ALL_IDS = np.arange(2**16)
PAPER_HEX = "23b4 b5aa bd74 c165 e2ab 1bef c1cd 70e4 650e 4746 554b b43d c4ef f0a2 87be 481c"


# ---------------------------------------------------------------- binary codes


def test_all_codes_are_the_ids_bits_and_invert():
    table = binary_codes(ALL_IDS)
    assert table.dtype == np.uint8 and table.shape == (2**16, 16)
    for t in ALL_IDS.tolist():
        assert table[t].tolist() == [int(digit) for digit in reversed(f"{t:016b}")]
    assert len(np.unique(table, axis=0)) == 2**16
    assert np.array_equal(ids_from_codes(table), ALL_IDS)
    assert binary_codes(6).tolist() == [0, 1, 1] + [0] * 13


@given(
    st.integers(1, 63).flatmap(
        lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1))
    )
)
def test_codes_of_any_width_invert(case):
    bits, ids = case
    table = binary_codes(ids, bits)
    assert table.shape == (len(ids), bits)
    assert ids_from_codes(table).tolist() == ids


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_ids_of_any_shape_and_integer_type(dtype):
    ids = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    table = binary_codes(ids)
    assert table.shape == (2, 3, 4, 16)
    assert np.array_equal(ids_from_codes(table), ids)
    assert binary_codes(ids[:0]).shape == (0, 3, 4, 16)


@pytest.mark.parametrize("ids", [-1, 2**16, [0, 2**16], [[5, -3]], 2**63])
def test_ids_out_of_range_are_refused(ids):
    with pytest.raises(ValueError, match="ids run from .* give 0 to 65535"):
        binary_codes(ids)


@pytest.mark.parametrize("ids", [1.0, [1.5], True, [True, False], "7", None, 2**64])
def test_ids_that_are_not_integers_are_refused(ids):
    with pytest.raises(ValueError, match="ids have type .* give 64-bit integers"):
        binary_codes(ids)


@pytest.mark.parametrize("value", [2, -1, 0.5, float("nan"), 255, 256, 257])
def test_values_that_are_no_bits_are_refused(value):
    bits = np.array([[1, 0], [value, 1]])
    for refuse in (
        ids_from_codes,
        gf2_rank,
        gf2_inverse,
        matrix_to_hex,
        lambda M: recode(np.zeros(2), M),
        lambda c: recode(c, np.eye(2)),
    ):
        with pytest.raises(ValueError, match="other than 0 and 1; give bits"):
            refuse(bits)


def test_codes_too_wide_for_an_id_are_refused():
    with pytest.raises(ValueError, match="64 bits do not fit"):
        ids_from_codes(np.zeros((1, 64)))


# ---------------------------------------------------------------- linear algebra over GF(2)


@st.composite
def bit_matrices(draw, largest):
    m, n = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    cells = draw(st.lists(st.integers(0, 1), min_size=m * n, max_size=m * n))
    return np.array(cells).reshape(m, n)


def span_size(M):
    """How many vectors the rows of M make, by adding up every subset of them."""
    subsets = itertools.product([0, 1], repeat=len(M))
    return len({tuple(np.array(subset) @ M % 2) for subset in subsets})


@given(bit_matrices(largest=6))
def test_rank_is_the_brute_force_rank(M):
    assert 2 ** gf2_rank(M) == span_size(M)


@given(bit_matrices(largest=12))
def test_rank_is_that_of_the_transpose(M):
    assert gf2_rank(M) == gf2_rank(M.T)


def test_rank_of_every_3_by_3_matrix():
    ranks = [gf2_rank(np.reshape(cells, (3, 3))) for cells in itertools.product([0, 1], repeat=9)]
    # (2^3 - 1)(2^3 - 2)(2^3 - 4) = 168 of the 512 are invertible.
    assert np.bincount(ranks).tolist() == [1, 49, 294, 168]


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_a_matrix_times_its_inverse_is_one(bits, seed):
    matrix = invertible_matrix(bits, seed)
    inverse = gf2_inverse(matrix)
    assert matrix.dtype == inverse.dtype == np.uint8
    assert np.array_equal(matrix.astype(int) @ inverse % 2, np.eye(bits))
    assert np.array_equal(inverse.astype(int) @ matrix % 2, np.eye(bits))


@given(bit_matrices(largest=5))
def test_only_square_matrices_of_full_rank_have_an_inverse(M):
    if M.shape[0] == M.shape[1] and span_size(M) == 2 ** len(M):
        assert np.array_equal(gf2_inverse(M) @ M % 2, np.eye(len(M)))
    else:
        with pytest.raises(ValueError, match="is singular"):
            gf2_inverse(M)


def test_functions_leave_their_input_as_it_was():
    matrix = invertible_matrix(16, 12345)
    before = matrix.copy()
    gf2_rank(matrix)
    gf2_inverse(matrix)
    recode(binary_codes(ALL_IDS), matrix, 5)
    assert np.array_equal(matrix, before)


def test_the_papers_seed_takes_the_second_draw():
    generator = np.random.default_rng(12345)
    first, second = generator.integers(0, 2, (16, 16)), generator.integers(0, 2, (16, 16))
    matrix = invertible_matrix(16, 12345)
    assert gf2_rank(first) < 16 and gf2_rank(second) == 16
    assert np.array_equal(matrix, second)
    assert matrix_to_hex(matrix) == PAPER_HEX


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_a_matrix_without_two_dimensions_is_refused(shape):
    for refuse in (gf2_rank, gf2_inverse, lambda M: recode(np.zeros(4), M)):
        with pytest.raises(ValueError, match="give rows and columns"):
            refuse(np.zeros(shape, dtype=int))


@pytest.mark.parametrize("bits, seed", [(0, 1), (-3, 1), (16, -1)])
def test_a_draw_that_cannot_be_is_refused(bits, seed):
    with pytest.raises(ValueError, match=f"seed is {seed}, bits {bits}; give"):
        invertible_matrix(bits, seed)


# ---------------------------------------------------------------- a matrix as text


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_hex_goes_both_ways(bits, seed):
    matrix = invertible_matrix(bits, seed)
    text = matrix_to_hex(matrix)
    assert np.array_equal(matrix_from_hex(text, bits), matrix)
    assert np.array_equal(matrix_from_hex(text.upper().replace(" ", "\n"), bits), matrix)


def test_hex_has_row_0_first_and_column_0_as_bit_0():
    assert matrix_from_hex("1 3 7 F", bits=4).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    assert matrix_from_hex("1 3 7 F", bits=4).dtype == np.uint8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2 4",
        "1 2 4 8 1",
        "1248",
        "1 2 4 g",
        "1 2 4 8 zz",
        "1 2 4 -8",
        "1 2 4 0x8",
        "1 2 4_0 8",
        "1 2 4 18",
        "1 2 4 " + "f" * 40,
    ],
)
def test_text_that_is_not_rows_of_hex_is_refused(text):
    with pytest.raises(ValueError, match="is not 4 hex words of 4 bits; give one a row"):
        matrix_from_hex(text, bits=4)


@pytest.mark.parametrize("text", ["1 2 4 4", "0 1 2 4", "1 2 3 8"])
def test_a_singular_matrix_in_hex_is_refused(text):
    with pytest.raises(ValueError, match="rank 3 is singular; give another"):
        matrix_from_hex(text, bits=4)


# ---------------------------------------------------------------- recoding


def unrecode(codes, matrix, offset=0):
    """The inverse of recode: A^-1 (c' + b)."""
    b = recode(np.zeros(len(matrix)), matrix, offset)
    return recode(codes ^ b, gf2_inverse(matrix))


def test_the_papers_recoding_of_every_id_is_injective_and_inverts():
    matrix, table = invertible_matrix(16, 12345), binary_codes(ALL_IDS)
    for offset in (0, 1, 54321):
        recoded = recode(table, matrix, offset)
        assert recoded.dtype == np.uint8
        b = np.array([offset >> i & 1 for i in range(16)])
        assert np.array_equal(recoded, (table.astype(int) @ matrix.T.astype(int) + b) % 2)
        assert len(np.unique(ids_from_codes(recoded))) == 2**16
        assert np.array_equal(unrecode(recoded, matrix, offset), table)


def test_recoding_is_additive():
    words = ids_from_codes(code_table("gf2", 2**16))
    for a in (0, 1, 2, 3, 255, 4096, 30000, 49151, 65535):
        assert np.array_equal(words[a ^ ALL_IDS], words[a] ^ words)
    # Additivity over all pairs follows from these: a code is the sum of its bits' codes.
    for bit in range(16):
        assert np.array_equal(words[ALL_IDS ^ 1 << bit], words ^ words[1 << bit])


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(0, 2**32), st.data())
def test_recoding_of_any_width_inverts(bits, seed, data):
    matrix, offset = invertible_matrix(bits, seed), data.draw(st.integers(0, 2**bits - 1))
    table = binary_codes(np.arange(2**bits), bits)
    recoded = recode(table, matrix, offset)
    assert np.array_equal(unrecode(recoded, matrix, offset), table)
    assert ids_from_codes(recoded[0]) == offset
    assert recode(table.reshape(2, -1, bits), matrix, offset).shape == (2, 2**bits // 2, bits)


@pytest.mark.parametrize("width", [16, 17, 40, 300, 2048])
def test_a_taller_matrix_of_full_column_rank_recodes_without_collision(width):
    matrix = np.random.default_rng(0).integers(0, 2, (width, 16))
    matrix[-16:] = np.eye(16)
    ids = np.arange(0, 2**16, 7)
    recoded = recode(binary_codes(ids), matrix)
    assert recoded.shape == (len(ids), width)
    expected = (binary_codes(ids).astype(np.float32) @ matrix.T.astype(np.float32)) % 2
    assert np.array_equal(recoded, expected)
    assert np.array_equal(ids_from_codes(recoded[:, -16:]), ids)
    # Offset 5 turns bits 0 and 2 over.
    turned = np.flatnonzero((recode(binary_codes(ids), matrix, offset=5) != recoded).all(axis=0))
    assert turned.tolist() == [0, 2]


def test_parity_survives_sums_above_255():
    matrix = np.triu(np.ones((600, 600), dtype=int))
    assert np.array_equal(recode(np.ones(600), matrix), np.arange(600, 0, -1) % 2)


def test_a_matrix_that_is_singular_or_misfits_the_codes_is_refused():
    singular = np.eye(16, dtype=int)
    singular[3] = singular[5]
    for matrix in (singular, np.eye(16)[:15]):
        with pytest.raises(ValueError, match=r"matrix \(\d+, \d+\) of rank \d+ is singular"):
            recode(binary_codes([1, 2]), matrix)
    for matrix in (np.eye(8), np.eye(17)):
        with pytest.raises(
            ValueError, match=r"matrix \(\d+, \d+\) misfits codes of shape \(2, 16\)"
        ):
            recode(binary_codes([1, 2]), matrix)


@pytest.mark.parametrize("offset", [-1, 2**16, 2**70])
def test_an_offset_out_of_range_is_refused(offset):
    matrix = invertible_matrix(16, 12345)
    for refuse in (
        lambda: recode(binary_codes(1), matrix, offset),
        lambda: code_table("gf2", 64, offset=offset),
    ):
        with pytest.raises(ValueError, match=f"offset is {offset}; give 0 to 65535"):
            refuse()
    with pytest.raises(ValueError, match=f"give 0 to {2**63 - 1}, whose bits are b"):
        code_table("signs128", 64, offset=2**63)  # what an int64 holds, though there are more bits
    assert (code_table("signs128", 64, offset=2**63 - 1) > 0)[0].sum() == 63


# ---------------------------------------------------------------- tables by name


def test_the_papers_tables():
    ids = np.arange(49_152)
    binary16, gf2 = code_table("binary16", 49_152), code_table("gf2", 49_152)
    assert binary16.dtype == gf2.dtype == np.float32
    assert binary16.shape == gf2.shape == (49_152, 16)
    assert np.array_equal(ids_from_codes(binary16), ids)
    assert np.array_equal(gf2, recode(binary_codes(ids), matrix_from_hex(PAPER_HEX)))
    assert len(np.unique(ids_from_codes(gf2))) == 49_152
    # The separator, id 0, has the zero code in both.
    assert not binary16[0].any() and not gf2[0].any()


@pytest.mark.parametrize("K", [16, 32, 64, 128, 256, 512, 1024, 2048])
def test_signs_are_linear_injective_and_span_what_their_bits_allow(K):
    table = code_table(f"signs{K}", 2**16, seed=5)
    assert table.shape == (2**16, K) and table.dtype == np.float32
    assert np.array_equal(np.unique(table), np.float32([-0.02, 0.02]))
    bits = (table > 0).astype(np.uint8)
    assert len(np.unique(np.packbits(bits, axis=1), axis=0)) == 2**16
    assert not bits[0].any()
    for bit in range(16):
        assert np.array_equal(bits[ALL_IDS ^ 1 << bit], bits ^ bits[1 << bit])
    matrix = bits[2 ** np.arange(16)].T  # the bits of a single one are a column of A
    assert np.array_equal(matrix, random_matrix(K, 16, 5)) and gf2_rank(matrix) == 16
    assert np.array_equal(table, code_table(f"signs{K}", 2**16, matrix=matrix))
    offset = code_table(f"signs{K}", 2**16, seed=5, offset=6)
    assert np.array_equal(np.flatnonzero((offset != table).any(axis=0)), [1, 2])
    if K <= 256:  # over the reals, as the model sees them, the codes span all K dimensions
        some = np.random.default_rng(0).permutation(2**16)[: 4 * K]
        assert np.linalg.matrix_rank(table[some].astype(float)) == K


def test_the_page_of_signs(capsys):
    codes.main(["--code", "signs256", "--vocab_size", "300"])
    page = capsys.readouterr().out
    assert "300 codes of 256 bits, all of them distinct, since A has rank 16" in page
    assert "Id with the zero code: none" in page


def test_signs_take_a_matrix_of_their_height_only():
    with pytest.raises(ValueError, match=r"has shape \(16, 16\); give \(32, 16\)"):
        code_table("signs32", 64, matrix=np.eye(16))
    with pytest.raises(ValueError, match="bits 17; give a seed from 0, 1 to 16 bits"):
        code_table("signs16", 64, bits=17)


def test_a_table_takes_its_seed_matrix_and_offset():
    matrix = matrix_from_hex("1 3 7 f", bits=4)
    table = code_table("gf2", 12, bits=4, seed=7, matrix=matrix, offset=9)
    assert np.array_equal(table, recode(binary_codes(np.arange(12), 4), matrix, 9))
    drawn = code_table("gf2", 300, bits=9, seed=7)
    assert np.array_equal(drawn, recode(binary_codes(np.arange(300), 9), invertible_matrix(9, 7)))
    identity = code_table("gf2", 100, matrix=np.eye(16, dtype=np.uint8))
    assert np.array_equal(identity, code_table("binary16", 100))


def test_another_code_is_one_function_and_one_name(monkeypatch):
    def repeated(bits, seed, matrix, offset):
        return LinearCode(np.tile(np.eye(bits), (3, 1)), offset, low=-1.0, high=2.0)

    monkeypatch.setitem(codes.LINEAR_CODES, "repeated", repeated)
    table = code_table("repeated", 200)
    assert table.shape == (200, 48) and table.dtype == np.float32
    bits = np.tile(binary_codes(np.arange(200)), 3)
    assert np.array_equal(table, 3.0 * bits - 1.0)


@pytest.mark.parametrize("name", codes.LINEAR_CODES)
def test_a_code_computes_some_ids_as_its_table_has_them(name):
    code = codes.linear_code(name, seed=9)
    ids = np.array([[0, 1, 49_151], [7, 65_535, 300]])
    assert np.array_equal(code.values(ids), code_table(name, 2**16, seed=9)[ids])


def test_codes_that_would_collide_are_refused():
    for matrix in (np.ones((40, 16)), np.eye(15, 16), np.zeros((16, 16))):
        with pytest.raises(ValueError, match=r"of rank \d+ is singular; give one of rank 16"):
            LinearCode(matrix)
    with pytest.raises(ValueError, match="offset is 65536; give 0 to 65535"):
        LinearCode(np.eye(16), offset=65_536)


@pytest.mark.parametrize("name", ["binary16", "gf2"])
@pytest.mark.parametrize("vocab_size", [-5, 0, 1, 65_537])
def test_a_vocabulary_that_does_not_fit_is_refused(name, vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; .* give 2 to 65536"):
        code_table(name, vocab_size)
    assert len(code_table(name, 65_536)) == 65_536


def test_what_a_code_does_not_use_is_refused():
    for unused in ({"matrix": np.eye(16)}, {"offset": 1}):
        with pytest.raises(ValueError, match="binary16 has neither matrix nor offset; drop them"):
            code_table("binary16", 64, **unused)


def test_a_matrix_that_is_not_in_gl_is_refused():
    for matrix in (np.eye(15), np.eye(17), np.ones((20, 16)), np.ones(16)):
        with pytest.raises(ValueError, match=r"the matrix has shape .*; give \(16, 16\)"):
            code_table("gf2", 64, matrix=matrix)
    with pytest.raises(ValueError, match="rank 1 is singular"):
        code_table("gf2", 64, matrix=np.ones((16, 16)))


def test_an_unknown_code_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="there is no code 'gf3'; choose from binary16, gf2, s"):
        code_table("gf3", 64)


# ---------------------------------------------------------------- the page


def test_the_page_of_the_paper(capsys):
    codes.main([])
    page = capsys.readouterr().out
    assert "49,152 codes of 16 bits, all of them distinct, since A has rank 16" in page
    words = [line.split()[-1] for line in page.splitlines()[3:19]]
    assert " ".join(words) == PAPER_HEX
    assert "Id with the zero code: 0\n" in page
    assert "Hamming distance over all pairs of codes: minimum 1, mean 8.0002" in page


@pytest.mark.parametrize(
    "arguments",
    [
        ["--code", "binary16"],
        ["--seed", "3"],
        ["--seed", "5", "--offset", "129"],
        ["--matrix", "1 3 7 f 1f 3f 7f ff", "--offset", "200"],
        ["--seed", "2", "--vocab_size", "9"],
        ["--seed", "8", "--vocab_size", "2", "--offset", "77"],
    ],
)
def test_the_pages_numbers_are_those_of_brute_force(arguments, capsys):
    codes.main(["--bits", "8", "--vocab_size", "100", *arguments])
    page = capsys.readouterr().out
    option = dict(zip(arguments[::2], arguments[1::2], strict=True))
    matrix = option.get("--matrix")
    table = code_table(
        option.get("--code", "gf2"),
        int(option.get("--vocab_size", 100)),
        bits=8,
        seed=int(option.get("--seed", 12345)),
        offset=int(option.get("--offset", 0)),
        matrix=None if matrix is None else matrix_from_hex(matrix, 8),
    )

    rows = [tuple(map(int, row)) for row in table]
    distances = [
        sum(x != y for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(rows, 2)
    ]
    mean = sum(distances) / len(distances)
    assert f"minimum {min(distances)}, mean {mean:.4f}\n" in page
    assert len(set(rows)) == len(rows)
    assert f"{len(rows)} codes of 8 bits, all of them distinct, since A has rank 8\n" in page
    zero = rows.index((0,) * 8) if (0,) * 8 in rows else "none"
    assert f"Id with the zero code: {zero}\n" in page
    for token_id, row in enumerate(rows[:8]):
        assert f"{token_id:6}   {' '.join(map(str, row))}\n" in page
    histogram = page.split("how many codes have n\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in histogram] == [
        [str(n), str(sum(sum(row) == n for row in rows))] for n in range(9)
    ]


@pytest.mark.parametrize("V", [1000, 1024, 1025])
def test_the_page_of_a_wide_code_compares_all_pairs(V, capsys):
    codes.main(["--code", "signs256", "--vocab_size", str(V)])
    page = capsys.readouterr().out
    bits = (code_table("signs256", V) > 0).astype(float)
    distances = bits @ (1 - bits).T + (1 - bits) @ bits.T  # (V, V)
    distances = distances[np.triu_indices(V, k=1)]
    assert f"minimum {distances.min():.0f}, mean {distances.mean():.4f}\n" in page


@pytest.mark.parametrize("code", ["binary16", "gf2", "signs64"])
def test_the_picture(code, tmp_path, capsys):
    from matplotlib.image import imread

    codes.main(["--code", code, "--vocab_size", "500", "--png", str(tmp_path / "codes.png")])
    height, width, _ = imread(tmp_path / "codes.png").shape
    assert height >= 400 and width >= 800


def test_importing_needs_no_matplotlib():
    done = run_script("-c", "import sys, codes; print('matplotlib' in sys.modules)")
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--code", "gf3"], "there is no code 'gf3'; choose from binary16, gf2"),
        (["--vocab_size", "65537"], "vocab_size is 65537; with 16 bits give 2 to 65536"),
        (["--bits", "0"], "bits is 0; give 1 to 63"),
        (["--seed", "-1"], "seed is -1, bits 16; give a seed from 0, 1 to 63 bits"),
        (["--offset", "65536"], "offset is 65536; give 0 to 65535, whose bits are b"),
        (["--matrix", ""], "matrix '' is not 16 hex words of 16 bits; give one a row"),
        (
            ["--bits", "2", "--vocab_size", "4", "--matrix", "3 3"],
            "matrix (2, 2) of rank 1 is singular; give another",
        ),
        (
            ["--code", "binary16", "--matrix", PAPER_HEX],
            "binary16 has neither matrix nor offset; drop them or choose gf2",
        ),
        (
            ["--code", "binary16", "--offset", "3"],
            "binary16 has neither matrix nor offset; drop them or choose gf2",
        ),
        (["--vocab_size", "9", "--png", "missing/a.png"], "No such file or directory"),
    ],
)
def test_refusals_are_one_sentence(arguments, sentence, capsys):
    assert sentence in refused_main(capsys, codes.main, *arguments)


def test_the_command_refuses_without_a_traceback():
    done = run_script("codes.py", "--code", "gf3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("codes.py: there is no code 'gf3'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["binary16", "gf2", "signs16"])
@pytest.mark.parametrize("bits", [-1, 0, 64, 10**9])
def test_a_code_has_a_whole_number_of_bits_that_an_id_can_have(name, bits):
    with pytest.raises(ValueError, match=f"bits is {bits}; give 1 to 63"):
        codes.linear_code(name, bits=bits)
