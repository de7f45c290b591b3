"""Token id -> fixed code of bits. Nothing is learned; what does not fit is a ValueError.

    python codes.py    a page about gf2, as the paper uses it; --code names another, --png draws

t, V       a token's id 0 <= t < V; the vocabulary size, 49,152 in the paper, at most 2^16
code(t)    the K = 16 bits of t, bit 0 first (little-endian): code(6) = 0 1 1 0 0 ... 0
A          a matrix in GL(16, 2): 16 x 16 bits, invertible over GF(2), where 1 + 1 = 0
b          the offset, K bits that are added to every code; 0 in the paper
code'(t)   = A code(t) + b over GF(2); as A is invertible, no two tokens share a code
R = 128    the tiles: the model repeats a code R times to its width, x[j] = code[j mod K]
"""
import argparse
from functools import partial

import numpy as np


def binary_codes(ids, bits=16):
    """Integers (...) in 0 .. 2^bits - 1 -> their bits, bit 0 first, uint8 (..., bits)."""
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"ids have type {ids.dtype}; give 64-bit integers")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**bits):
        raise ValueError(f"ids run from {ids.min()} to {ids.max()}; give 0 to {2**bits - 1}")
    return (ids.astype(np.int64)[..., None] >> np.arange(bits) & 1).astype(np.uint8)


def ids_from_codes(codes):
    """The inverse of binary_codes: bits (..., bits), at most 63 -> int64 (...)."""
    codes = zeros_and_ones(codes)
    if codes.shape[-1] > 63:
        raise ValueError(f"codes of {codes.shape[-1]} bits do not fit in an int64; give up to 63")
    return codes @ (1 << np.arange(codes.shape[-1]))


def zeros_and_ones(values):
    if not np.isin(values, (0, 1)).all():
        raise ValueError("a code or a matrix holds a value other than 0 and 1; give bits")
    return np.asarray(values, np.uint8)


def gf2_rank(M):
    """The rank over GF(2) of a 0/1 matrix (m, n)."""
    if np.ndim(M) != 2:
        raise ValueError(f"the matrix has shape {np.shape(M)}; give rows and columns")
    basis = []
    for row in zeros_and_ones(M):
        word = int("".join(map(str, row)), 2)
        for other in basis:
            word = min(word, word ^ other)  # the one without the leading bit of the other
        if word:
            basis.append(word)
    return len(basis)


def gf2_inverse(M):
    """The inverse over GF(2) of M (n, n), uint8; a singular M is refused."""
    n = gf2_rank(M)
    if np.shape(M) != (n, n):
        raise ValueError(f"matrix {np.shape(M)} of rank {n} is singular; give another")
    rows = np.hstack([zeros_and_ones(M), np.eye(n, dtype=np.uint8)])  # (n, 2n)
    for column in range(n):
        pivot = column + rows[column:, column].argmax()
        rows[[column, pivot]] = rows[[pivot, column]]
        others = rows[:, column] * (np.arange(n) != column)
        rows ^= np.outer(others, rows[column])
    return rows[:, n:]


def invertible_matrix(bits, seed, rows=None):
    """A uniform draw from GL(bits, 2), uint8 (bits, bits); with more rows, from the matrices
    (rows, bits) of full column rank. How a seed draws is our choice."""
    if seed < 0 or not 1 <= bits <= (rows or bits):
        raise ValueError(f"seed is {seed}, bits {bits}; give a seed from 0, 1 to {rows or 63} bits")
    generator = np.random.default_rng(seed)
    while gf2_rank(matrix := generator.integers(0, 2, (rows or bits, bits))) < bits:
        pass  # about 29 % of the square draws are invertible, and nearly all tall ones
    return matrix.astype(np.uint8)


def matrix_to_hex(matrix):
    """One hex word per row, row 0 first; bit 0 of a word is column 0."""
    return " ".join(f"{word:04x}" for word in ids_from_codes(matrix))


def matrix_from_hex(text, bits=16):
    """The inverse of matrix_to_hex, uint8 (bits, bits); a singular matrix is refused."""
    hexadecimal = set(text.lower()) <= set("0123456789abcdef \t\n")
    rows = [int(word, 16) for word in text.split()] if hexadecimal else []
    if not 0 < len(rows) == bits or max(rows) >= 2**bits:
        raise ValueError(f"matrix {text!r} is not {bits} hex words of {bits} bits; give one a row")
    matrix = binary_codes(rows, bits)
    gf2_inverse(matrix)  # refuses a singular one
    return matrix


def recode(codes, matrix, offset=0):
    """A c + b over GF(2): codes c (..., n), A (m, n) of rank n, b = code(offset) -> (..., m)."""
    codes, rank = zeros_and_ones(codes), gf2_rank(matrix)
    m, n = np.shape(matrix)
    if rank < n or codes.shape[-1:] != (n,):
        raise ValueError(f"matrix {m, n} of rank {rank} is singular or misfits codes; give another")
    if not 0 <= offset < 2 ** min(m, 63):
        raise ValueError(f"offset is {offset}; give 0 to {2 ** min(m, 63) - 1}, whose bits are b")
    # A uint8 sum wraps at 256, which is even, so its last bit is the true parity.
    return (codes @ zeros_and_ones(matrix).T & 1) ^ binary_codes(offset, m)


def binary16(vocab_size, bits, seed, matrix, offset):
    """The paper's canonical code: code(t)."""
    if matrix is not None or offset:
        raise ValueError("binary16 has neither matrix nor offset; drop them or choose gf2")
    return binary_codes(np.arange(vocab_size), bits)


def gf2(vocab_size, bits, seed, matrix, offset, K=None):
    """The paper's recoded code: code'(t) = A code(t) + b. With K, which is ours, A is (K, bits)."""
    matrix = invertible_matrix(bits, seed, K) if matrix is None else matrix
    if np.shape(matrix) != (K or bits, bits):
        raise ValueError(f"the matrix has shape {np.shape(matrix)}; give {(K or bits, bits)}")
    return recode(binary_codes(np.arange(vocab_size), bits), matrix, offset)


def signs(*args, K):
    """Ours: K bits A code(t), with A (K, bits), as -0.02 and 0.02. No two codes are the same, their
    mean is about 0, and they are as small as the numbers of a learned table at its start."""
    return np.float32(0.04) * gf2(*args, K) - np.float32(0.02)


CODES = {"binary16": binary16, "gf2": gf2}  # a new code: a function like these, and its name
CODES |= {f"signs{K}": partial(signs, K=K) for K in (16, 32, 64, 128, 256, 512, 1024, 2048)}


def code_table(name, vocab_size, *, bits=16, seed=12345, matrix=None, offset=0):
    """The code of that name for the ids 0 .. V - 1, which have `bits` bits, float32 (V, K).

    The seed draws the matrix of a code that has one, unless a matrix is given.
    """
    if name not in CODES:
        raise ValueError(f"there is no code {name!r}; choose from {', '.join(CODES)}")
    if not 2 <= vocab_size <= 2**bits:
        raise ValueError(f"vocab_size is {vocab_size}; with {bits} bits give 2 to {2**bits}")
    return CODES[name](vocab_size, bits, seed, matrix, offset).astype(np.float32)


def print_page(table, matrix):
    (V, K), codes = table.shape, (table > 0).astype(np.uint8)
    words = np.packbits(np.pad(codes, ((0, 0), (0, -K % 64))), axis=1).view(np.uint64)
    print(f"{V:,} codes of {K} bits, {len(np.unique(words, axis=0)):,} of them distinct")
    if matrix is not None:
        print("\nMatrix A: row i makes bit i of a code, and bit 0 of its hex word is column 0")
        for row, word in zip(matrix, matrix_to_hex(matrix).split(), strict=True):
            print("   ", *row, "", word)
    print("\nFirst codes: id, bit 0 to the last bit")
    for token_id, code in enumerate(codes[:8]):
        print(f"{token_id:6}  ", *code)
    print("\nOnes in a code: how many codes have n")
    for n, count in enumerate(np.bincount(codes.sum(axis=1, dtype=int), minlength=K + 1)):
        print(f"{n:6} {count:9,}  {'#' * (200 * count // V)}")
    print("\nId with the zero code:", *np.flatnonzero(~table.any(axis=1)).tolist() or ["none"])
    mean = 2 * V / (V - 1) * codes.var(axis=0).sum()  # two codes differ in a bit by its variance
    nearest = min(np.bitwise_count(w ^ words[i:]).sum(1).min() for i, w in enumerate(words[:-1], 1))
    print(f"Hamming distance over all pairs of codes: minimum {nearest}, mean {mean:.4f}")


def save_picture(file, table, matrix):
    from matplotlib.figure import Figure
    images = {} if matrix is None else {"A: row i makes bit i of a code": matrix}
    images["codes of the first ids, one a column, bit 0 on top"] = table[:96].T
    figure = Figure(figsize=(12, 6), layout="constrained")
    for place, (title, image) in enumerate(images.items(), start=1):
        figure.add_subplot(len(images), 1, place, title=title).imshow(image, cmap="gray_r")
    figure.savefig(file)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--code", default="gf2", help=f"one of {', '.join(CODES)}")
    parser.add_argument("--vocab_size", type=int, default=49152)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--seed", type=int, default=12345, help="draws A where none is given")
    parser.add_argument("--matrix", help="A as hex words in one argument, row 0 first")
    parser.add_argument("--offset", type=int, default=0, help="an integer, its bits are b")
    parser.add_argument("--png", help="draw A and the code table into this file")
    args = parser.parse_args(argv)
    try:
        matrix = invertible_matrix(args.bits, args.seed) if args.code == "gf2" else None
        if args.matrix is not None:
            matrix = matrix_from_hex(args.matrix, args.bits)
        table = code_table(args.code, args.vocab_size, bits=args.bits, seed=args.seed,
                           matrix=matrix, offset=args.offset)
        print_page(table, matrix)
        if args.png:
            save_picture(args.png, table, matrix)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
