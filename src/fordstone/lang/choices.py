"""Options that take one of several words, and names that must be known: checked when they are given, with the nearest in the error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from fordstone.errors import ConfigError, FordstoneError

_LETTERS_MIN: Final = 3


def did_you_mean(given: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question that names the nearest of the known words, or the empty text if none is near."""
    lowered = {name.lower(): name for name in known}
    near = get_close_matches(str(given).lower(), lowered, n=1, cutoff=cutoff)
    return f"Did you mean {lowered[near[0]]!r}?" if near else ""


def check_word(
    option: str, given: object, words: Iterable[str], *, where: str = "", error: type[FordstoneError] = ConfigError
) -> None:
    """Raise unless the value of an option is one of these words. `where` begins the message: `"sink alarms: "`."""
    known = tuple(words)
    if isinstance(given, str) and given in known:
        return
    # Of units, which have one or two letters, any other one is near.
    hint = did_you_mean(given, [word for word in known if len(word) >= _LETTERS_MIN]) if isinstance(given, str) else ""
    raise error(f"{where}{option}={given!r} must be {one_of(known)}.{hint and f' {hint}'}")


def check_options(given: Iterable[str], known: Iterable[str], *, where: str) -> None:
    """Raise if an option that does not exist was given by name. `where` begins the message: `"run: "`."""
    names = tuple(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"Options are: {', '.join(names)}."
            raise ConfigError(f"{where}there is no option {name!r}. {hint}")


def one_of(words: Iterable[str]) -> str:
    """The words as a list to choose from: `'a', 'b' or 'c'`."""
    *most, last = map(repr, words)
    return f"{', '.join(most)} or {last}" if most else last
