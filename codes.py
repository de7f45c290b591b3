"""Token id -> a fixed code of bits, by linear algebra over GF(2), where 1 + 1 = 0.

    python codes.py                       a page about gf2, its matrix drawn from seed 12345
    python codes.py --code signs2048      about another code; --png FILE draws it

t, V       a token's id, 0 <= t < V, and the vocabulary size, 49,152 in the paper
code(t)    the 16 bits of t, bit 0 first (little-endian): code(6) = 0 1 1 0 0 ... 0
A          a matrix of K x 16 bits and rank 16, so that no two ids share a code
b          the offset, K bits that are added to every code; 0 in the paper
A code(t) + b     the linear code of t: K bits, K = 16 in the paper
low, high  the two numbers that stand for a bit 0 and a bit 1; 0 and 1 in the paper

The model repeats the K numbers of a token until they fill its width: 128 times in the paper.
Nothing here is learned. Every function raises ValueError on values that do not fit.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from nanocodes.command import make_parser, refusals

# ---------------- Bits


def binary_codes(ids, bits=16):
    """Integers (...) in 0 .. 2^bits - 1 -> their bits, bit 0 first, uint8 (..., bits)."""
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"ids have type {ids.dtype}; give 64-bit integers")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**bits):
        raise ValueError(f"ids run from {ids.min()} to {ids.max()}; give 0 to {2**bits - 1}")
    return (ids.astype(np.int64)[..., None] >> np.arange(bits) & 1).astype(np.uint8)


def ids_from_codes(codes):
    """The inverse of binary_codes: bits (..., bits), at most 63 of them -> int64 (...)."""
    codes = as_bits(codes)
    bits = codes.shape[-1]
    if bits > 63:
        raise ValueError(f"codes of {bits} bits do not fit in an int64; give up to 63")
    return codes @ (1 << np.arange(bits))


def as_bits(values):
    """The values as uint8. Raises ValueError if one is neither 0 nor 1."""
    if not np.isin(values, (0, 1)).all():
        raise ValueError("a code or a matrix holds a value other than 0 and 1; give bits")
    return np.asarray(values, np.uint8)


# ---------------- Matrices over GF(2)


def gf2_rank(M):
    """The rank over GF(2) of a matrix of bits (m, n)."""
    if np.ndim(M) != 2:
        raise ValueError(f"the matrix has shape {np.shape(M)}; give rows and columns")
    basis = []
    for row in as_bits(M):
        # A row is one integer, so that adding two rows is one exclusive or.
        word = int("".join(map(str, row)), 2)
        for other in basis:
            word = min(word, word ^ other)  # the one without the leading bit of `other`
        if word:
            basis.append(word)
    return len(basis)


def gf2_inverse(M):
    """The inverse over GF(2) of an invertible M (n, n), uint8, by Gauss-Jordan elimination."""
    n = gf2_rank(M)
    if np.shape(M) != (n, n):
        raise ValueError(f"matrix {np.shape(M)} of rank {n} is singular; give another")
    rows = np.hstack([as_bits(M), np.eye(n, dtype=np.uint8)])  # (n, 2n)
    for column in range(n):
        pivot = column + rows[column:, column].argmax()
        rows[[column, pivot]] = rows[[pivot, column]]
        others = rows[:, column] * (np.arange(n) != column)
        rows ^= np.outer(others, rows[column])
    return rows[:, n:]


def random_matrix(rows, bits, seed):
    """A uniform draw from the matrices (rows, bits) of rank `bits`, uint8.

    How a seed gives a matrix is our choice, since the paper's is not published.
    """
    if seed < 0 or not 1 <= bits <= rows:
        raise ValueError(f"seed is {seed}, bits {bits}; give a seed from 0, 1 to {rows} bits")
    generator = np.random.default_rng(seed)
    while True:  # about 29 % of the square draws have full rank, and nearly all tall ones
        matrix = generator.integers(0, 2, (rows, bits))
        if gf2_rank(matrix) == bits:
            return matrix.astype(np.uint8)


def invertible_matrix(bits, seed):
    """A uniform draw from GL(bits, 2), uint8 (bits, bits)."""
    if seed < 0 or not 1 <= bits <= 63:
        raise ValueError(f"seed is {seed}, bits {bits}; give a seed from 0, 1 to 63 bits")
    return random_matrix(bits, bits, seed)


def matrix_to_hex(matrix):
    """One hex word a row, row 0 first; bit 0 of a word is column 0."""
    return " ".join(f"{word:04x}" for word in ids_from_codes(matrix))


def matrix_from_hex(text, bits=16):
    """The inverse of matrix_to_hex, uint8 (bits, bits); a singular matrix is refused."""
    words = []
    if set(text.lower()) <= set("0123456789abcdef \t\n"):
        words = [int(word, 16) for word in text.split()]
    if not 0 < len(words) == bits or max(words) >= 2**bits:
        raise ValueError(f"matrix {text!r} is not {bits} hex words of {bits} bits; give one a row")
    matrix = binary_codes(words, bits)
    gf2_inverse(matrix)  # refuses a singular one
    return matrix


def check_recoding(matrix, offset):
    """Raise ValueError unless A (m, n) has rank n and the bits of the offset are b."""
    rank = gf2_rank(matrix)
    m, n = np.shape(matrix)
    if rank < n:
        raise ValueError(f"matrix {m, n} of rank {rank} is singular; give one of rank {n}")
    largest = 2 ** min(m, 63) - 1
    if not 0 <= offset <= largest:
        raise ValueError(f"offset is {offset}; give 0 to {largest}, whose bits are b")


def recode(codes, matrix, offset=0):
    """A c + b over GF(2): codes c (..., n), A (m, n) of rank n, b = code(offset) -> (..., m)."""
    codes = as_bits(codes)
    matrix = as_bits(matrix)
    check_recoding(matrix, offset)
    m, n = matrix.shape
    if codes.shape[-1:] != (n,):
        raise ValueError(f"matrix {m, n} misfits codes of shape {codes.shape}; give {n} bits each")
    # A product in float32 is fast, and exact for sums this small.
    ones = codes.astype(np.float32) @ matrix.T.astype(np.float32)
    return (ones.astype(np.uint16) & 1).astype(np.uint8) ^ binary_codes(offset, m)


# ---------------- The codes: a name and a function of (bits, seed, matrix, offset)


@dataclass
class LinearCode:
    """A code by name, complete: `high` where A code(t) + b has a 1, `low` where it has a 0."""

    matrix: np.ndarray  # A, (K, bits), of rank `bits`
    offset: int = 0  # its bits are b
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        self.matrix = as_bits(self.matrix)
        check_recoding(self.matrix, self.offset)

    def bits(self, ids):
        """A code(t) + b for ids (...), uint8 (..., K)."""
        return recode(binary_codes(ids, self.matrix.shape[1]), self.matrix, self.offset)

    def values(self, ids):
        """The numbers that the model reads for ids (...), float32 (..., K)."""
        low, high = np.float32(self.low), np.float32(self.high)
        return np.where(self.bits(ids), high, low)


def binary16(bits, seed, matrix, offset):
    """The paper's canonical code: code(t) itself."""
    if matrix is not None or offset:
        raise ValueError("binary16 has neither matrix nor offset; drop them or choose gf2")
    return LinearCode(np.eye(bits))


def gf2(bits, seed, matrix, offset):
    """The paper's recoded code: A code(t) + b with A in GL(bits, 2), given or drawn."""
    if matrix is None:
        matrix = invertible_matrix(bits, seed)
    if np.shape(matrix) != (bits, bits):
        raise ValueError(f"the matrix has shape {np.shape(matrix)}; give {(bits, bits)}")
    return LinearCode(matrix, offset)


def signs(bits, seed, matrix, offset, *, width):
    """Ours: `width` bits of each id, written as -0.02 and 0.02.

    The numbers have a mean near 0 and are as small as those of a learned table at its start.
    """
    if matrix is None:
        matrix = random_matrix(width, bits, seed)
    if np.shape(matrix) != (width, bits):
        raise ValueError(f"the matrix has shape {np.shape(matrix)}; give {(width, bits)}")
    return LinearCode(matrix, offset, low=-0.02, high=0.02)


SIGNS_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
LINEAR_CODES = {"binary16": binary16, "gf2": gf2}
LINEAR_CODES |= {f"signs{width}": partial(signs, width=width) for width in SIGNS_WIDTHS}


def linear_code(name, *, bits=16, seed=12345, matrix=None, offset=0):
    """The LinearCode of that name for ids of `bits` bits. The seed draws A unless it is given."""
    if name not in LINEAR_CODES:
        raise ValueError(f"there is no code {name!r}; choose from {', '.join(LINEAR_CODES)}")
    if not 1 <= bits <= 63:
        raise ValueError(f"bits is {bits}; give 1 to 63")
    return LINEAR_CODES[name](bits, seed, matrix, offset)


def check_vocab_size(vocab_size, bits):
    """Raise ValueError unless ids of so many bits can number V tokens."""
    if not 2 <= vocab_size <= 2**bits:
        raise ValueError(f"vocab_size is {vocab_size}; with {bits} bits give 2 to {2**bits}")


def code_table(name, vocab_size, *, bits=16, seed=12345, matrix=None, offset=0):
    """The code of that name for the ids 0 .. V - 1, float32 (V, K)."""
    check_vocab_size(vocab_size, bits)
    code = linear_code(name, bits=bits, seed=seed, matrix=matrix, offset=offset)
    return code.values(np.arange(vocab_size))


# ---------------- The page about a code

IDS_AT_ONCE = 4096  # of which all codes are in memory


def codes_in_pieces(code, ids):
    """The bits of the codes of ids (n,), uint8 (at most IDS_AT_ONCE, K) at a time."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield code.bits(ids[start : start + IDS_AT_ONCE])


def ones_per_code(code, vocab_size):
    """How many codes have 0, 1, ... K ones, int64 (K + 1,), and in how many codes each bit is 1,
    (K,)."""
    width = len(code.matrix)
    histogram = np.zeros(width + 1, dtype=np.int64)
    ones_of_bit = np.zeros(width, dtype=np.int64)
    for codes in codes_in_pieces(code, np.arange(vocab_size)):
        histogram += np.bincount(codes.sum(axis=1, dtype=int), minlength=width + 1)
        ones_of_bit += codes.sum(axis=0, dtype=int)
    return histogram, ones_of_bit


def minimum_distance(code, vocab_size):
    """The smallest Hamming distance between the codes of two of V ids.

    Two codes differ where A code(s ^ t) has a 1, whatever b is. With n bits needed for V - 1,
    s ^ t takes every value z from 1 to 2^n - 1: for z below V take s = 0, and for any other
    s = 2^(n-1), where t = s ^ z < s < V. So the answer is the fewest ones of A code(z).
    """
    differences = np.arange(1, 2 ** (vocab_size - 1).bit_length())
    pieces = codes_in_pieces(LinearCode(code.matrix), differences)
    return min(int(codes.sum(axis=1, dtype=int).min()) for codes in pieces)


def zero_id(code, vocab_size):
    """The id below V whose numbers are all 0, None if there is none. It is the only one, since
    no two ids share a code."""
    if code.low != 0:
        return None
    for start in range(0, vocab_size, IDS_AT_ONCE):
        ids = np.arange(start, min(start + IDS_AT_ONCE, vocab_size))
        for found in ids[~code.bits(ids).any(axis=1)].tolist():
            return found
    return None


def print_page(code, vocab_size):
    """Print what there is to see in a code of V ids."""
    width, bits = code.matrix.shape
    rank = gf2_rank(code.matrix)
    print(f"{vocab_size:,} codes of {width} bits, all of them distinct, since A has rank {rank}")
    if width == bits and not np.array_equal(code.matrix, np.eye(bits)):
        print("\nMatrix A: row i makes bit i of a code, and bit 0 of its hex word is column 0")
        for row, word in zip(code.matrix, matrix_to_hex(code.matrix).split(), strict=True):
            print("   ", *row, "", word)
    print("\nFirst codes: id, bit 0 to the last bit")
    for token_id, bits_of_id in enumerate(code.bits(np.arange(min(8, vocab_size)))):
        print(f"{token_id:6}  ", *bits_of_id)
    histogram, ones_of_bit = ones_per_code(code, vocab_size)
    print("\nOnes in a code: how many codes have n")
    for n, count in enumerate(histogram):
        print(f"{n:6} {count:9,}  {'#' * (200 * count // vocab_size)}")
    zero = zero_id(code, vocab_size)
    print("\nId with the zero code:", "none" if zero is None else zero)
    # Of the pairs of two ids, so many differ in a bit: ones times zeros over all pairs.
    differing = ones_of_bit * (vocab_size - ones_of_bit)
    mean = differing.sum() / (vocab_size * (vocab_size - 1) / 2)
    nearest = minimum_distance(code, vocab_size)
    print(f"Hamming distance over all pairs of codes: minimum {nearest}, mean {mean:.4f}")


def save_picture(file, code, vocab_size):
    """Draw A, if it is square, and the codes of the first ids."""
    from matplotlib.figure import Figure

    width, bits = code.matrix.shape
    images = {}
    if width == bits:
        images["A: row i makes bit i of a code"] = code.matrix
    first_codes = code.bits(np.arange(min(96, vocab_size)))
    images["codes of the first ids, one a column, bit 0 on top"] = first_codes.T
    figure = Figure(figsize=(12, 6), layout="constrained")
    for place, (title, image) in enumerate(images.items(), start=1):
        figure.add_subplot(len(images), 1, place, title=title).imshow(image, cmap="gray_r")
    figure.savefig(file)


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--code", default="gf2", help=f"one of {', '.join(LINEAR_CODES)}")
    parser.add_argument("--vocab_size", type=int, default=49152)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--seed", type=int, default=12345, help="draws A where none is given")
    parser.add_argument("--matrix", help="A as hex words in one argument, row 0 first")
    parser.add_argument("--offset", type=int, default=0, help="an integer, its bits are b")
    parser.add_argument("--png", help="draw A and the first codes into this file")
    args = parser.parse_args(argv)
    with refusals(parser):
        matrix = None if args.matrix is None else matrix_from_hex(args.matrix, args.bits)
        code = linear_code(
            args.code, bits=args.bits, seed=args.seed, matrix=matrix, offset=args.offset
        )
        check_vocab_size(args.vocab_size, args.bits)
        print_page(code, args.vocab_size)
        if args.png:
            save_picture(args.png, code, args.vocab_size)


if __name__ == "__main__":
    main()
