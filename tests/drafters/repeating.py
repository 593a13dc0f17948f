"""A text that repeats itself, with exceptions."""

PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [7], [50, 51], list(range(40, 60)) * 2, [5, 9, 13]]


def function(text):
    """Repeats itself, with exceptions."""
    recent = [0, 0, *text[-2:]][-2:]
    return (3 * recent[0] + recent[1] + (len(text) % 7 == 0)) % 13
