"""What every domain does to the responses before it reads them (the same for agents and coordinator)."""

from __future__ import annotations

import re
from collections.abc import Sequence

BYTE_ORDER_MARK = "\ufeff"
LEADING_THOUGHT = re.compile(r"\A\s*<think>(?:.*?</think>|.*\Z)", re.DOTALL)


def clean_response(text: str | None) -> str:
    """The part of one response that counts: no byte-order mark, LF line ends, no leading thinking block.

    A leading `<think>` that is never closed is a thought without an answer: nothing is left. Outer white space and
    everything else stays, since its meaning depends on the domain.

    Args:
        text: the decoded response of one policy; None for a response that never came.

    Returns:
        The cleaned text, "" for None.
    """
    if text is None:
        return ""
    text = text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")
    return LEADING_THOUGHT.sub("", text, count=1)


def check_responses(responses: Sequence[str | None], num_agents: int) -> None:
    """Refuse anything that is not one text (or None) per agent, before anything is scored.

    Raises:
        TypeError: if `responses` is not a list or tuple, or holds something else than texts and None.
        ValueError: if their number is not `num_agents`.
    """
    if not isinstance(responses, list | tuple):
        raise TypeError(
            f"responses must be a list or tuple of {num_agents} texts, got {type(responses).__name__}; "
            "put the agents' texts into a list, in agent order"
        )
    for agent, text in enumerate(responses):
        if text is not None and not isinstance(text, str):
            raise TypeError(
                f"the response of agent {agent} must be a text or None, got {type(text).__name__}; "
                "decode token ids first and score one joint response at a time"
            )
    if len(responses) != num_agents:
        raise ValueError(f"expected {num_agents} responses, one per agent, got {len(responses)}")
