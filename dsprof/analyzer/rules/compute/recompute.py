"""compute.recompute: activations are computed again in backward although what memory there is would hold them.

What keeping them takes is bounded from above by what was measured. While a block is computed again memory holds
parameters, states, buffers and that block's activations, whatever else: so these are no more than the peak less those.
Kept instead of computed again, each of the blocks takes no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dsprof.schema import CHECKPOINTED_FACT

from ... import signals
from ...candidate import Between, Candidate, Price
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...memory.free import surely_free
from ...memory.use_by_step import MemoryUse, main_place
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import count, percent, size
from ...whatif.work import Change, LessWork
from ...work.recomputed import pieces_a_step, pieces_at_once, recomputed_ms
from ..base import LEAST_SHARE, NotConcerned, NotJudged, at, config_sections, place_fix, settings_fix
from ..rule import Found, Look, Rule

BESIDE_MS: Final = 0.85
"""Of a block, at most: what checkpointing does beside computing it again (hooks on what is saved, the state of random
numbers), on a CPU. Measured by benchmarks/constants.py."""
BESIDE_ON_DEVICE_MS: Final = 1.4
"""The same of the host of a device, which counts as far as the device waits for it: an H100's, for 12 blocks at level
full (benchmarks/results/gpu_pairs.json, "recomputed without need": 26.5 ms, of which 9.9 to compute them again)."""
LASTING: Final = ("parameters", "optimizer_states", "buffers")
"""What is there whenever a block is computed again. Gradients need not be: they may be made later."""


@dataclass(frozen=True)
class Kept:
    """pieces:    blocks that are computed again in a backward
    fit:       how many of them may surely be kept, on every rank
    piece:     bytes that one of them takes at most, on the rank that has least room for them
    use:       of that rank
    free:      bytes that it surely has left
    """

    pieces: int
    fit: int
    piece: int
    use: MemoryUse
    free: int

    @property
    def part(self) -> float:
        """Of the recomputation, what need not be; 0 to 1."""
        return self.fit / self.pieces


@once
def kept_in_memory(study: Study) -> Kept | str | None:
    """How much of what is computed again memory would hold; in words why that cannot be told; None where nothing is
    computed again."""
    if recomputed_ms(study) is None:
        return None
    pieces = pieces_at_once(study)
    found: list[Kept] = []
    for rank in study.ranks:
        use = main_place(study.memory_uses, rank)
        if use is None:
            return "memory was not sampled"
        free = surely_free(study.memory, study.memory_uses, use)
        if free is None:
            return "it is not known how much memory there is"
        if LASTING[0] not in use.parts:  # of plain SGD there are no states, and none are found
            return "what memory is for (parameters, optimizer states) was not looked at"
        piece = use.peak - sum(use.parts.get(part, 0) for part in LASTING)
        if piece <= 0 or not pieces:
            return "the samples of memory do not tell what one block takes"
        fit = pieces if free >= (pieces - 1) * piece else max(int(free // piece), 0)
        found.append(Kept(pieces, fit, piece, use, max(free, 0)))
    return min(found, key=lambda one: (one.fit, one.free - one.piece))


def recomputation(study: Study) -> Found:
    """What need not be computed again, since memory would hold it."""
    signals.steps(study)
    kept = kept_in_memory(study)
    if kept is None:
        raise NotConcerned
    again = recomputed_ms(study)
    assert again is not None
    if again.mean() < LEAST_SHARE * study.step_ms:
        return []
    if isinstance(kept, str):
        raise NotJudged(
            f"activations are computed again in backward ({percent(100 * float(again.mean()) / study.step_ms)} of the "
            f"step), and {kept}: whether memory would hold them is not known"
        )
    if not kept.fit:
        return []
    gone = {"compute": (again * kept.part).clip(max=study.work("compute"))}
    less = LessWork("compute.recompute", Change(gone, launches=True), study.peer_groups)

    def say(price: Price) -> Finding:
        return _finding(study, kept, price.gain)

    spent = float(again.mean())
    beside = pieces_a_step(study) * (BESIDE_ON_DEVICE_MS if study.on_gpu else BESIDE_MS)
    between = Between(1.0, 1 + beside / spent, (spent + beside) * kept.part)
    return [Candidate("compute.recompute", less, say, between=between, a_trade=True)]


def _finding(study: Study, kept: Kept, gain: Gain) -> Finding:
    again = recomputed_ms(study)
    assert again is not None
    spent = float(again.mean())
    use = kept.use
    every = kept.fit == kept.pieces
    what = "all of them" if every else f"{kept.fit} of {count(kept.pieces, 'block')}"
    title = (
        f"activations are computed again in backward, {percent(100 * spent / study.step_ms)} of the step, though "
        f"memory would hold {what}: {size(kept.free)} are surely left on rank {use.rank}"
    )
    evidence = (
        Evidence("recomputation a step", round(spent, 3), "ms", round(spent * (1 - kept.part), 3)),
        Evidence("blocks computed again in a backward", kept.pieces, "count", kept.pieces - kept.fit),
        Evidence("a block's activations, at most", kept.piece, "bytes"),
        Evidence("peak", use.peak, "bytes"),
        Evidence("memory there is", use.capacity or 0, "bytes"),
    )
    where = Where(op="recompute", steps=study.step_range)
    return Finding("compute.recompute", title, "info", where, evidence, gain, fixes(study, kept, gain))


# --- what to type ---------------------------------------------------------------------------------


def fixes(study: Study, kept: Kept, gain: Gain) -> tuple[Fix, ...]:
    """Less checkpointing, as the job switches it on."""
    left = kept.pieces - kept.fit
    memory = f" (takes at most {size(kept.fit * kept.piece)} more on each rank)"
    for section in config_sections(study, "activation_checkpointing"):
        if section.get("policy", "none") != "none":
            return (_of_config(section, kept, memory, gain),)
    command = study.run.command
    if any(word.startswith("--recompute-") for word in command):
        return (_of_megatron(left, memory, gain),)
    made = study.facts.get(CHECKPOINTED_FACT, [])
    framework = next((fact["framework"] for fact in made if fact.get("framework")), None)
    site = next((fact["site"] for fact in made if fact.get("site")), None)
    if framework == "transformers" and not left:
        title = "leave out --gradient_checkpointing, or TrainingArguments(gradient_checkpointing=False)"
        return (settings_fix(title + memory, {"--gradient_checkpointing": False}, None, gain),)
    if framework in ("accelerate", "lightning") and not left:
        call = {"accelerate": "fsdp_activation_checkpointing: false in the FSDP plugin's configuration",
                "lightning": "FSDPStrategy(activation_checkpointing_policy=None)"}[framework]  # fmt: skip
        return (settings_fix(call + memory, {"activation_checkpointing": None}, None, gain),)
    if framework is not None and left:  # the line is that which calls the framework, and not where blocks are called
        title = f"have {framework} checkpoint {left} of the {kept.pieces} blocks only"
        return (Fix("code", title + memory, gain=gain),)
    if left:
        title = f"call torch.utils.checkpoint for {left} of the {kept.pieces} blocks only{at(site)}"
    else:
        title = f"call the blocks without torch.utils.checkpoint{at(site)}"
    found = [place_fix(title + memory, site, gain)]
    if left and not any(fact.get("selective") for fact in made):
        policy = (
            "or keep what costs most to compute in every block (context_fn of create_selective_checkpoint_contexts)"
        )
        found.append(Fix("code", policy))
    return tuple(found)


def _of_config(section: Mapping[str, Any], kept: Kept, memory: str, gain: Gain) -> Fix:
    """Of a configuration of dsprof's engine, which says which blocks it wraps."""
    policy, left = section.get("policy"), kept.pieces - kept.fit
    place = "/activation_checkpointing"
    if not left:
        patch: tuple[dict[str, Any], ...] = ({"op": "replace", "path": f"{place}/policy", "value": "none"},)
        knobs = (("activation_checkpointing.policy", "none"),)
        return Fix("config", f'activation_checkpointing.policy: "none"{memory}', patch, gain, knobs)
    if policy == "selective":
        title = f"name {left} of the {kept.pieces} blocks in activation_checkpointing.blocks{memory}"
        return Fix("code", title, (), gain)
    every = int(section.get("every", 2)) if policy == "every_k" else 1
    every = every * kept.pieces // left
    patch = (
        {"op": "replace", "path": f"{place}/policy", "value": "every_k"},
        {"op": "replace" if "every" in section else "add", "path": f"{place}/every", "value": every},
    )
    knobs_of = (("activation_checkpointing.policy", "every_k"), ("activation_checkpointing.every", every))
    title = f'activation_checkpointing.policy: "every_k", every: {every}{memory}'
    return Fix("config", title, patch, gain, knobs_of)


def _of_megatron(left: int, memory: str, gain: Gain) -> Fix:
    if not left:
        return settings_fix(
            "leave out --recompute-activations and --recompute-granularity" + memory,
            {"--recompute-granularity": None}, None, gain,
        )  # fmt: skip
    flags: dict[str, Any] = {
        "--recompute-granularity": "full",
        "--recompute-method": "block",
        "--recompute-num-layers": left,
    }
    typed = " ".join(f"{flag} {value}" for flag, value in flags.items())
    return settings_fix(typed + memory, flags, None, gain)


RULES = (
    Rule(
        "compute.recompute",
        "activations are computed again although memory would hold them",
        explains=("compute",),
        looks=(Look(recomputation, needs=(signals.replay,)),),
        needs=(signals.memory_by_step,),
        error=ModelError(of_gain=0.15, of_step=0.014, busy=0.014),
        place=212,
    ),
)
