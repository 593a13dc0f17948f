"""What an index of tokens must answer, by a plain search."""

from specengine._C import CONTINUATION_KINDS

WHOLE = [1.0] * CONTINUATION_KINDS


def followers(pieces, string):
    """How often each token comes behind a string, and where it did last."""
    counts = {}
    for number, piece in enumerate(pieces):
        for start in range(len(piece) - len(string)):
            if piece[start : start + len(string)] == string:
                token = piece[start + len(string)]
                counts[token] = counts.get(token, (0,))[0] + 1, (number, start)
    return counts


def kind(length, count, every, first):
    """The definition once more."""
    bits = min(5, length.bit_length()) - 1
    if first:
        known = (0 if count == 1 else 1) if count == every else 2 if 2 * count >= every else 3
    else:
        known = 4 if 2 * count >= every else 5
    return 6 * bits + known
