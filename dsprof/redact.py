"""Takes secrets out of what dsprof writes: passwords, keys and tokens in command lines, settings and messages.

A secret is known by the name it stands under (`--api-key X`, `HF_TOKEN=X`, `{"password": "X"}`), by its form (a bearer
token, a URL with a password, an AWS key), or because the environment or the command line of this process has it under
such a name. Names of ordinary settings are left alone: `--tokenizer`, `--max-tokens 512`, `--key-dim`, `--pad-token`.

What is redacted is redacted once: doing it again changes nothing. Standard library only, as ranks use it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from .secret_names import Secrecy, secrecy

REDACTED: Final = "[redacted]"

Known = tuple[str, ...]

FORMS: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"
    r"|\b(?:hf_|api_org_)[A-Za-z0-9]{16,}"
    r"|\b(?:sk|pk|rk)[-_](?:ant-|proj-|live_|test_|or-)?[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abeoprs]-[\w-]{10,}|\bhooks\.slack\.com/services/[\w/]+"
    r"|\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|\b(?:npm_|pypi-|nvapi-|dckr_pat_|dop_v1_|r8_|gsk_|wandb_v1_|local-)[A-Za-z0-9_-]{24,}",
    re.DOTALL,
)
"""Secrets that are known by their form, whoever gives them out."""
USER_AND_PASSWORD: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s/:@'\"]*:)([^\s/'\"]+)(?=@)")
USER_ALONE: Final = re.compile(r"(https?://)([^\s/:@'\"]{16,})(?=@)")
BEARER: Final = re.compile(r"(?i)(\bbearer\s+)([\w.~+/=-]{8,})")
AUTHORIZATION: Final = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token|digest)\s+)?)([^\s\"',}]+)"
)
SETTING: Final = re.compile(
    r"(?P<key>[A-Za-z_][\w.-]*)(?P<between>\\?[\"']?\s*[:=]\s*)"
    r"(?P<value>\\?\"[^\"]*\"|'[^']*'|[^\s,;&\"'(){}\[\]\\]+)"
)
"""`KEY=VALUE`, `key: value`, and what JSON and Python write."""
FLAG: Final = re.compile(
    r"(?<![\w-])(?P<key>--?[A-Za-z][\w.-]*)(?P<between>[\"']?\s*,\s*[\"']|\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"',]+)"
)
"""A flag and its value in one text: of a command, or of a list of its words."""
LONG_WORD: Final = re.compile(r"(?<![\w/+=.-])[A-Za-z0-9_+/=-]{32,}(?![\w/.-])")
HEX: Final = re.compile(r"(?<![\w/@])[0-9a-f]{40}(?![\w/])")
HEXADECIMAL: Final = re.compile(r"[0-9a-fA-F]{16,}")
SCHEMES: Final = frozenset({"basic", "bearer", "token", "digest"})
"""Stand before what is secret in a header."""
REVISION: Final = re.compile(
    r"(?i)(?:commit|revision|rev|sha\d*|hash|digest|checksum|snapshot|version|ref|git|id)\W{0,4}$"
)
"""What stands before forty hexadecimal digits that are no key of W&B's, but a revision's."""
PLAIN: Final = re.compile(
    r"(?i)[-+]?[\d_.]+(?:e[-+]?\d+)?|true|false|none|null|yes|no|on|off|auto|default|\$\{?\w+\}?|"
)
"""Values that are nobody's secret: numbers, switches, the name of a variable."""
BRACKETED: Final = ("<", "[", "{", "/", "./", "~")
"""Begin special tokens of a vocabulary, lists, objects and paths."""
RANDOM: Final = 0.45
"""Of the letters and digits of a random text six in ten are of another kind (upper, lower, digit) than the one before.
Of words that people write it is one in four at most."""
USER_FLAGS: Final = frozenset({"-u", "--user", "--proxy-user", "-U"})
"""Whose value may be `user:password`."""
SHORTEST_KNOWN: Final = 8
SHORT: Final = ("key", "token", "pass")
"""Names that tell more with the one that they stand under: of `wandb`, the key."""
NAME_AND_VALUE: Final = (("name", "value"), ("key", "value"), ("Name", "Value"))
"""How lists of variables are written where they are no mapping."""


# --- lists of words -------------------------------------------------------------------------------


def redact_words(words: Sequence[str]) -> list[str]:
    """A command line: what was typed, without its secrets."""
    known = known_secrets()
    out: list[str] = []
    flag = ""
    for word in words:
        out.append(_word(word, flag, known))
        flag = word if word[:1] == "-" and "=" not in word else ""
    return out


def _word(word: str, flag: str, known: Known) -> str:
    """A word of a command line, behind a flag or, if that is empty, by itself."""
    is_value = bool(flag) and (word[:1] != "-" or bool(PLAIN.fullmatch(word)))
    if is_value and is_secret(flag, word):
        return REDACTED
    if is_value and flag in USER_FLAGS and ":" in word and "://" not in word:
        return f"{word.partition(':')[0]}:{REDACTED}"
    if is_value and HEX.fullmatch(word) and REVISION.search(flag):
        return word
    key, equals, value = word.partition("=")
    if equals and re.fullmatch(r"-{0,2}[+~]{0,2}[A-Za-z_][\w.@/-]*", key):
        if is_secret(key, value):
            return f"{key}={REDACTED}"
        return f"{key}={_word(value, key, known)}" if value[:1] != "-" else f"{key}={_text(value, known)}"
    return _text(word, known)


# --- settings -------------------------------------------------------------------------------------


def redact_data(value: Any) -> Any:
    """Data as JSON knows it: a configuration, a fact."""
    return _data(value, known_secrets())


def _data(value: Any, known: Known, key: str = "") -> Any:
    """`key`: what the value stands under."""
    if isinstance(value, str):
        return _text(value, known)
    if isinstance(value, Mapping):
        named = {kept: value[name] for name, kept in NAME_AND_VALUE if isinstance(value.get(name), str)}
        return {one: _member(str(named.get(one, f"{key}.{one}" if one in SHORT else one)), value[one], known)
                for one in value}  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [_data(one, known, key) for one in value]
    return value


def _member(key: str, value: Any, known: Known) -> Any:
    if isinstance(value, (Mapping, list, tuple)):
        return _everything(value) if secrecy(key) is Secrecy.SURE else _data(value, known, key)
    if value is None or isinstance(value, bool):
        return value
    return REDACTED if is_secret(key, str(value)) else _data(value, known)


def _everything(value: Any) -> Any:
    """All that lies below a name such as `credentials`."""
    if isinstance(value, Mapping):
        return {key: _everything(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_everything(one) for one in value]
    return value if value is None or isinstance(value, bool) else REDACTED


def redact_setting(key: str, value: str) -> str:
    """The value of a variable or of a key."""
    return REDACTED if is_secret(key, value) else redact_text(value)


# --- texts ----------------------------------------------------------------------------------------


def redact_text(text: str) -> str:
    """A message, a line, a title."""
    return _text(text, known_secrets())


def _text(text: str, known: Known) -> str:
    for secret in known:
        if secret in text:
            text = text.replace(secret, REDACTED)
    if len(text) < SHORTEST_KNOWN:
        return text
    text = FORMS.sub(REDACTED, text)
    if "://" in text:
        text = USER_AND_PASSWORD.sub(_behind, text)
        text = USER_ALONE.sub(_behind, text)
    text = AUTHORIZATION.sub(_behind, BEARER.sub(_behind, text))
    if "=" in text or ":" in text:
        text = SETTING.sub(_setting, text)
    if "-" in text:
        text = FLAG.sub(_setting, text)
    text = HEX.sub(_hexadecimal, text)
    return LONG_WORD.sub(lambda found: REDACTED if looks_random(found[0]) else found[0], text)


def _behind(found: re.Match[str]) -> str:
    return found[1] + (found[2] if found[2].startswith(REDACTED) else REDACTED)


def _setting(found: re.Match[str]) -> str:
    key, between, value = found["key"], found["between"], found["value"]
    quote = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    inner = value[len(quote) : len(value) - len(quote)] if quote else value
    secret = is_secret(key, inner)
    if secret and not quote and between.rstrip() != between and secrecy(key) is not Secrecy.SURE:
        # A sentence, such as `unexpected token: word`
        secret = key.startswith("-") or (len(inner) >= SHORTEST_KNOWN and any(map(str.isdigit, inner)))
    if secret:
        return f"{key}{between}{quote}{REDACTED}{quote}"
    # What follows may be a setting of its own: `args: --api-key=X`.
    return f"{key}{between}{SETTING.sub(_setting, value)}"


def _hexadecimal(found: re.Match[str]) -> str:
    return found[0] if REVISION.search(found.string[: found.start()]) else REDACTED


def looks_random(text: str) -> bool:
    """Whether a word of letters and digits is one that nobody would write or say: base64 of random bytes, say."""
    kinds = [0 if letter.isdigit() else 1 if letter.islower() else 2 for letter in text if letter.isalnum()]
    if len(kinds) < 16 or len(set(kinds)) < 3:
        return False
    return sum(one != other for one, other in pairwise(kinds)) >= RANDOM * (len(kinds) - 1)


# --- what is secret -------------------------------------------------------------------------------


def is_secret(key: str, value: str) -> bool:
    """Whether `value`, which stands under the name `key`, is to be kept from others."""
    how = secrecy(key)
    if how is Secrecy.NONE or value == REDACTED or value.lower() in SCHEMES:
        return False
    if how is Secrecy.SURE:
        return value.strip().lower() not in ("", "none", "null", "true", "false")
    if PLAIN.fullmatch(value) or value.startswith(BRACKETED):
        return False
    if how is Secrecy.IF_RANDOM:
        return ":" in value or looks_random(value) or bool(HEXADECIMAL.fullmatch(value))
    return True


def known_secrets(environ: Mapping[str, str] | None = None, words: Iterable[str] | None = None) -> Known:
    """What the environment and the command line (by default this process's) have under the name of a secret."""
    found: set[str] = set()
    try:
        variables = list((os.environ if environ is None else environ).items())
    except RuntimeError:  # another thread of the job changes it
        variables = []
    typed = tuple(getattr(sys, "argv", ()) if words is None else words)
    for key, value in (*variables, *_typed(typed)):
        if len(value) >= SHORTEST_KNOWN and is_secret(key, value) and _is_singular(value):
            found.add(value)
    return tuple(sorted(found, key=lambda secret: (-len(secret), secret)))


@lru_cache(maxsize=16)
def _typed(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names and values of a command line."""
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in words if "=" in word]
    return (*pairs, *((flag, value) for flag, value in pairwise(words) if flag[:1] == "-" and value[:1] != "-"))


def _is_singular(value: str) -> bool:
    """Whether it stands for nothing else: a password may be an ordinary word."""
    return any(map(str.isdigit, value)) or len(value) >= 12
