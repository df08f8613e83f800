"""Secrets that a text of the job's own may hold are left out before it is written."""

from __future__ import annotations

import re
from typing import Final

LEFT_OUT: Final = "[redacted]"

_SECRET_KEY: Final = r"(?:api|access|auth|secret|private)[_-]?key|secret|token|passw(?:or)?d|pwd|credentials?"
PATTERNS: Final = (
    # scheme://user:password@host, scheme://token@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE), rf"\1{LEFT_OUT}@"),
    # Authorization: Bearer ...
    (re.compile(r"\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {LEFT_OUT}"),
    # api_key=..., "token": "...", --password ...
    (
        re.compile(
            rf"""((?:{_SECRET_KEY})[a-z0-9_-]*["']?(?:\s*[=:]\s*|(?<=\w)\s+(?=\S*\d)))(?!\[)("[^"]*"|'[^']*'|[^\s,;&"')\]}}]+)""",
            re.IGNORECASE,
        ),
        rf"\1{LEFT_OUT}",
    ),
    # Keys that are known by how they begin: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, Google.
    (
        re.compile(
            r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abeprs]-)[A-Za-z0-9_-]{10,}"
            r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
        ),
        LEFT_OUT,
    ),
    # Three parts in base64: JSON web tokens.
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), LEFT_OUT),
)


def redacted(text: str) -> str:
    """`text` with LEFT_OUT in the place of values of secret keys, of passwords in URLs, and of tokens."""
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text
