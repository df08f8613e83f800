"""Files as a bad disk, a full one or somebody hostile leaves them."""

from __future__ import annotations

import random


def damaged(chance: random.Random, whole: bytes) -> bytes:
    """Cut, bits flipped, bytes put in, or a part of it repeated."""
    data, how = bytearray(whole), chance.randrange(4)
    if how == 0:
        del data[chance.randrange(len(data)) :]
    for _ in range(chance.randrange(1, 9)):
        place = chance.randrange(len(data) + 1)
        if how == 1 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif how == 2:
            data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(9)))
        elif how == 3:
            data[place:place] = data[: chance.randrange(len(data) + 1)][-64:]
    return bytes(data)
