"""Command-line arguments as DeepSpeed's scripts declare them."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads; returns `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (the script decides)")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine's configuration, a JSON file")
    return parser
