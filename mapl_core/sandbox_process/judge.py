"""The trusted side: one process that runs one test, with a proxy in the place of the function it tests."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import plain_data
from .channel import receive, send

PASS, FAIL = b"P", b"F"
MESSAGE_CHARACTERS = 500


class ProgramError(Exception):
    """The program raised an exception, gave something that is not plain data, or is gone."""


def judge(job: dict, channel: int) -> bytes:
    """Run a test against the program at the other end of the channel.

    Args:
        job: the texts `program`, `entry_point`, `setup` (the problem's own helpers) and `test`, which defines
            `check(candidate)`.
        channel: where the program's process listens.

    Returns:
        The verdict, and for a failure its reason.
    """
    try:
        send(channel, plain_data.dumps((job["entry_point"], job["program"])))
        main = _proxy(channel)
        names = {"__name__": "test", "__builtins__": __builtins__}
        random.seed(0)
        for text in (job["setup"], job["test"]):
            exec(compile(text, "<test>", "exec", dont_inherit=True), names)
            names[job["entry_point"]] = main  # whatever the problem's text or the test bound to it
        names["check"](main)
    except AssertionError as error:
        return FAIL + _message(str(error) or "the assertion does not hold")
    except ProgramError as error:
        return FAIL + _message(str(error))
    except BaseException as error:  # comparing a wrong kind of result raises as well
        return FAIL + _message(f"{type(error).__name__}: {error}")
    return PASS


def _proxy(channel: int) -> Callable[..., object]:
    def main(*arguments: object, **keywords: object) -> object:
        request = plain_data.dumps((arguments, keywords))
        try:
            send(channel, request)
            answer = receive(channel)
        except (EOFError, OSError):
            raise ProgramError("the program ended before it answered") from None
        except ValueError as error:
            raise ProgramError(f"the program's answer cannot be read: {error}") from None
        if answer[:1] == b"R":
            try:
                return plain_data.loads(answer[1:])
            except (ValueError, RecursionError, MemoryError) as error:
                raise ProgramError(f"the program's answer cannot be read: {error}") from None
        raise ProgramError(answer[1:].decode("utf-8", "replace"))

    return main


def _message(text: str) -> bytes:
    return text[:MESSAGE_CHARACTERS].encode("utf-8", "replace")
