"""Names under which secrets stand, and names of ordinary settings that look like them. Standard library only."""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from itertools import pairwise
from typing import Final


class Secrecy(enum.Enum):
    """What is to be thought of a value that stands under a name."""

    NONE = 0
    SURE = 1
    """A secret, whatever it is."""
    LIKELY = 2
    """A secret, unless it is plainly something else: a number, a switch, a token of a vocabulary."""
    IF_RANDOM = 3
    """A secret only if it looks like one."""


SURE: Final = frozenset(
    {
        "password", "passwords", "passwd", "passphrase", "passcode", "secret", "secrets", "credential", "credentials",
        "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authkey", "apitoken", "authtoken", "accesstoken",
        "bearertoken", "apisecret", "clientsecret", "authorization", "cookie", "cookies", "connectionstring",
    }
)  # fmt: skip
"""Words that make a name one of a secret, wherever they stand in it."""
ABOUT: Final = frozenset(
    {
        "file", "files", "path", "dir", "folder", "name", "names", "id", "ids", "len", "length", "type", "count",
        "size", "dim", "num", "policy", "env", "var", "ttl", "timeout", "manager", "provider", "scope", "scopes",
        "version", "required", "enabled", "error", "prompt", "host", "region", "class", "module",
    }
)  # fmt: skip
"""Last words of names that tell of a secret and do not hold it: `password_file`."""
KEYS: Final = frozenset(
    {
        "api", "access", "secret", "private", "auth", "encryption", "decryption", "signing", "ssh", "account",
        "storage", "license", "master", "service", "aws", "wandb", "hf", "huggingface", "openai", "anthropic", "azure",
        "gcp", "google", "neptune", "comet", "mlflow", "clearml", "subscription", "client", "consumer", "deploy", "ssl",
        "tls", "application", "admin", "ngc", "cohere", "mistral", "groq", "gemini", "replicate",
        "datadog", "dd", "sentry", "swanlab", "pinecone", "qdrant",
    }
)  # fmt: skip
"""Words before `key` that make it one that opens something."""
OPENING: Final = frozenset({"api", "access", "secret", "private", "auth"})
"""Those before a `key` that need not be the last word."""
VOCABULARY: Final = frozenset(
    {
        "pad", "padding", "eos", "bos", "unk", "unknown", "mask", "sep", "cls", "image", "video", "audio", "special",
        "stop", "end", "start", "begin", "add", "new", "next", "per", "first", "last", "prefix", "suffix", "middle",
        "fim", "eot", "eod", "eoh", "sot", "class", "decoder", "encoder", "target", "source", "input", "output",
        "think", "additional", "separator", "delimiter", "role", "placeholder", "of", "a", "by", "each", "the", "every",
        "draft", "distillation", "dist", "register", "object", "speech", "language", "lang", "word", "sub", "vision",
        "im",
    }
)  # fmt: skip
"""Words before `token` that make it one of a vocabulary."""
TOKENS: Final = frozenset({"access", "auth", "api", "refresh", "secret", "bearer", "session", "security", "identity"})
"""Words before `token` or `tokens` that make it one that opens something."""
LOGINS: Final = frozenset(
    {"db", "database", "user", "smtp", "mysql", "postgres", "pg", "redis", "root", "admin", "login", "mail", "ldap",
     "ftp", "proxy", "rabbitmq", "mongo", "sudo", "key", "auth"}
)  # fmt: skip
"""Words before `pass` or `pwd` that make it a password."""
PARTS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """What to think of a value under this name: `--api-key`, `HF_TOKEN`, `wandb.apiKey`."""
    words = [word.lower() for word in PARTS.findall(name[-200:])]
    while len(words) > 1 and words[-1].isdigit():  # API_KEY_2
        words.pop()
    if not words:
        return Secrecy.NONE
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ABOUT:
        return Secrecy.NONE
    if not SURE.isdisjoint(words):
        return Secrecy.SURE
    if any(one in OPENING and other == "key" for one, other in pairwise(words)):  # OPENAI_API_KEY_PROD
        return Secrecy.SURE
    if last in ("token", "tokens") and before in TOKENS:
        return Secrecy.SURE
    if last in ("key", "keys") and before in KEYS:
        return Secrecy.SURE
    if last == "token":
        return Secrecy.NONE if before in VOCABULARY else Secrecy.LIKELY
    if last == "pwd":
        return Secrecy.NONE if before == "old" else Secrecy.LIKELY
    if last == "pass":
        return Secrecy.SURE if before in LOGINS else Secrecy.NONE if before else Secrecy.LIKELY
    if last == "pat" and before:
        return Secrecy.IF_RANDOM
    if words[-2:] in (["connection", "string"], ["conn", "str"]):
        return Secrecy.SURE
    if words == ["key"] or last in ("auth", "dsn", "signature", "sig"):
        return Secrecy.IF_RANDOM
    return Secrecy.NONE
