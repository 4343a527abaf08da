"""Whether engines hold what was sent, by a checksum of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

from megarl.rollout.client import EngineClient
from megarl.rollout.protocol import BadAnswer, EngineError
from megarl.sync.crew import Crew, Targets


def against_sent(crew: Crew, targets: Targets, sums: Mapping[str, str]) -> None:
    """Engines that name their tensors as the trainers do: compare each with the checksum that its source computed.

    Args:
        sums: of this rank's tensors, by name.
    """
    sent = {name: value for part in crew.gathered(dict(sums)) for name, value in part.items()}

    async def check(client: EngineClient) -> None:
        held = (await client.checksums())["checksums"]
        wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
        if wrong:
            raise EngineError(f"{client.url}: {len(wrong)} of {len(sent)} tensors differ from what was sent: "
                              + ", ".join(wrong[:5]) + (" ..." if len(wrong) > 5 else ""))

    crew.tell(targets, check, "verify the weights")


def against_each_other(crew: Crew, targets: Targets, expected: str = "") -> str:
    """Engines with tensors of their own making (SGLang fuses them): all must hold the same.

    If they do not, those in the minority fail; without a majority, all do.

    Args:
        expected: what engines held that took this version before.
    Returns:
        A digest of what they hold, on trainer 0.
    """
    agreed = [expected]

    def compare(failed: dict[int, str]) -> None:
        digests = {engine.key: answer for engine, answer in zip(
            targets.engines, crew.ask(targets.engines, _digest, crew.call_timeout_s), strict=True)}
        votes = Counter(digest for digest in digests.values() if isinstance(digest, str))
        best, count = votes.most_common(1)[0] if votes else ("", 0)
        agreed[0] = expected or (best if 2 * count > sum(votes.values()) else "")
        for one in targets.sets:
            for engine in one.engines:
                digest = digests[engine.key]
                if isinstance(digest, EngineError):
                    failed[one.number] = str(digest)
                elif digest != agreed[0]:
                    failed[one.number] = f"{engine.url}: holds other weights than other engines"

    crew.per_set(targets, lambda failed: compare(failed) if crew.is_zero else None)
    return agreed[0]


async def _digest(client: EngineClient) -> str:
    """Of all ranks' tensors in an answer of SGLang's /weights_checker."""
    answer = await client.checksums()
    try:
        sums = [rank["checksums"] for rank in answer["ranks"]]
    except (KeyError, TypeError) as error:
        raise BadAnswer(f"{client.url}/weights_checker has another form: {str(answer)[:200]}") from error
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
