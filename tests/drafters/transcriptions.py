"""Lookahead decoding and Ouroboros once more, as the papers and their published code say, one context at a time.

target(context) and small(context) give the token that follows. Both differ from the published code where the drafters
do: a guess of the window that is right is accepted, a suffix that is right to its end is followed by one more token, no
phrase is twice in a pool.
"""

from random import Random


def insert(pool, width, token, phrase):
    own = pool.setdefault(token, [])
    if phrase in own:
        own.remove(phrase)
    elif len(own) == width:
        own.pop(0)
    own.append(phrase)


def replace(pool, token, before, after):
    own = pool.get(token, [])
    if before in own:
        place = own.index(before)
        own[place] = after
        if own.count(after) == 2:
            own.remove(after)


def said_behind(model, context, phrases):
    """The tokens that follow a context, as far as one of the phrases says them, and one more."""
    said = [model(context)]
    while any(list(phrase[: len(said)]) == said for phrase in phrases):
        said.append(model(context + said))
    return said


def first_window(text, columns, n):
    draw = Random(10)
    return [[draw.choice(text) for _ in range(columns + n - 3)]]


def window_pass(model, context, past, columns, n):
    """What the model says behind every column of the window's last level, and the paths that lead there."""
    paths = [past[0][:i] + [level[i] for level in past[1:]] for i in range(columns + n - 1 - len(past))]
    return [model(context + path) for path in paths], paths


def next_window(pool, width, last, past, new, n):
    if len(past) < n - 1:
        return [level[1:] for level in past] + [new[1:]]
    for i in range(len(new)):
        insert(pool, width, last if i == 0 else past[0][i - 1], tuple([level[i] for level in past[1:]] + [new[i]]))
    levels = [*past[1:], new]
    return [levels[0][1:], *levels[1:]]


def lookahead(target, text, columns, n, guesses, prompt):
    """Yields per cycle: the paths tried, the tokens committed, the pool and the window after it."""
    text, pool, past = list(text), {}, first_window(text, columns, n)
    for i in range(len(text) - n + 1 if prompt else 0):
        insert(pool, guesses, text[i], tuple(text[i + 1 : i + n]))
    while True:
        phrases = pool.get(text[-1], [])
        new, paths = window_pass(target, text, past, columns, n)
        tried = [*map(list, phrases), *paths]
        said = said_behind(target, text, tried)
        past = next_window(pool, guesses, text[-1], past, new, n)
        for token in said:
            text.append(token)
            if prompt and len(text) >= n:
                insert(pool, guesses, text[-n], tuple(text[len(text) - n + 1 :]))
        yield tried, said, pool, past


def ouroboros(target, small, text, length, columns, n, suffixes, inspire, refine):
    """Yields per cycle: the sentence, its suffixes, the tokens committed, the pool and the window after it."""
    text, pool, past = list(text), {}, first_window(text, columns, n)
    while True:
        sentence = []
        while len(sentence) < length:
            context = text + sentence
            phrases = pool.get(context[-1], [])
            new, _ = window_pass(small, context, past, columns, n)
            said = said_behind(small, context, phrases)
            past = next_window(pool, columns, context[-1], past, new, n)
            sentence += said
        sentence = sentence[:length]
        ends = list(pool.get(sentence[-1], []))[-suffixes:] if suffixes else []
        said = [target(text + sentence[:i]) for i in range(length + 1)]
        right = next((i for i in range(length) if sentence[i] != said[i]), length)
        if right < length:
            committed = said[: right + 1]
            for start in range(right, length if inspire else 0):
                phrase, i = [said[start + 1]], start + 1
                while len(phrase) < n - 1 and i < length and sentence[i] == phrase[-1]:
                    phrase.append(said[i + 1])
                    i += 1
                if len(phrase) == n - 1:
                    insert(pool, columns, sentence[start], tuple(phrase))
        else:
            committed = sentence + said_behind(target, text + sentence, ends)
        if refine == "always" or (refine == "confirmed" and right == length):
            for phrase in ends:
                along = tuple(target(text + sentence + list(phrase[:i])) for i in range(n - 1))
                replace(pool, sentence[-1], phrase, along)
        text += committed
        yield sentence, ends, committed, pool, past
