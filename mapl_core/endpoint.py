"""An OpenAI-compatible chat endpoint as a source of texts: DeepSeek, vLLM's own server, and others (appendix B.1).

`EndpointSettings` says where it is and how it is asked; `Endpoint` asks it, a few requests at a time, again after a
fault that may pass, and keeps every answer on disk, so that a run that goes on or is repeated pays for nothing twice.

The key stands in the environment alone. It is in no setting, cached answer, manifest, log or message, and exceptions of
the library, whose requests hold it, end here: what went wrong is told in words of this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, get_type_hints

from tqdm import tqdm

from mapl_core.notebook import cast_parameter
from mapl_core.pocket.common import cache_dir
from mapl_core.results import folder_lock, write_atomically

BASE_URL = re.compile(r"https?://(?:[\w.-]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?(?:/[^\s@?#]*)?")
VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
OWN_FIELDS = ("model", "messages", "n", "stream")  # of a request; no option may change them
NO_KEY = "none"  # what an endpoint without a key is told; with nothing given, the library would send OPENAI_API_KEY
HIDDEN = "[the key]"

DRAWS = 2**31  # a draw is a number below it
FIRST_WAIT, LONGEST_BACKOFF = 1.0, 60.0  # seconds
LONGEST_WAIT = 600.0  # seconds; an endpoint that asks for more is asked again by a later run
MAY_PASS = (408, 409, 429)  # and every status from 500 on
OUT_OF_CREDIT = "insufficient_quota"  # a 429 that waiting does not cure
ENDED, CUT = ("stop",), ("length", "content_filter")  # finish reasons; after any other one there is no answer
FIRST_ANSWERS = 16  # if all of these say nothing, the rest is not paid for
WORDLESS = (
    "The token limit was reached before the first word, as happens to a model that reasons first: switch its reasoning "
    "off in endpoint.options, or raise max_new_tokens"
)
BAR_DELAY = 5.0  # seconds after which a progress bar is shown


class EndpointError(ValueError):
    """The endpoint cannot be asked, or gives no answer; the message says why and what to do, and holds no key."""


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndpointSettings:
    """Where an endpoint is and how it is asked: the values of a profile's `endpoint`.

    Attributes:
        url: base address, which /chat/completions follows: https://api.deepseek.com, http://127.0.0.1:8000/v1.
        model: name of the model there.
        key_variable: NAME of the environment variable that holds the key; None for an endpoint that asks for none.
        concurrency: requests that are under way at a time.
        timeout: seconds that an attempt waits for the endpoint to send something.
        retries: how often a request is sent again after a fault that may pass.
        input_price, output_price: of a million tokens, in the currency of the bill; without both there is no cost.
        options: more fields of a request, such as {"top_k": 20} for vLLM or {"thinking": {"type": "disabled"}} for
            DeepSeek. They win over the fields that a run sets (max_tokens, temperature, top_p, seed); null leaves one
            out: {"seed": null}.

    Raises:
        EndpointError: for a value that cannot work. What may be a key is not shown.
    """

    url: str
    model: str
    key_variable: str | None = None
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 6
    input_price: float | None = None
    output_price: float | None = None
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise EndpointError(f"endpoint.{message}")

        require(
            not re.search("[@?#]", self.url),
            "url holds a user, a query or a fragment (not shown, since it may be a secret); give the bare address, and "
            "in endpoint.key_variable the name of the environment variable that holds the key",
        )
        require(
            bool(BASE_URL.fullmatch(self.url)),
            f"url is {self.url!r}; it must be an address that begins with https:// or http://, such as "
            "https://api.deepseek.com or http://127.0.0.1:8000/v1",
        )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        require(
            not self.url.endswith("/chat/completions"),
            f"url is {self.url!r}; leave out /chat/completions, which the client adds",
        )
        require(bool(self.model), "model is empty; name a model that the endpoint serves")
        require(
            self.key_variable is None
            or (isinstance(self.key_variable, str) and bool(VARIABLE_NAME.fullmatch(self.key_variable))),
            "key_variable must be the NAME of an environment variable in capitals, such as DEEPSEEK_API_KEY, never the "
            "key itself (what was given is not shown)",
        )
        require(self.concurrency >= 1, f"concurrency is {self.concurrency}; it must be at least 1")
        require(self.timeout > 0, f"timeout is {self.timeout}; it must be positive")
        require(self.retries >= 0, f"retries is {self.retries}; it must be at least 0")
        for name in ("input_price", "output_price"):
            price = getattr(self, name)
            require(price is None or price >= 0, f"{name} is {price}; it must be at least 0, or null where unknown")
        try:
            # As JSON gives them back, so that a cached request equals the one that is asked.
            object.__setattr__(self, "options", json.loads(json.dumps(self.options, allow_nan=False)))
        except (TypeError, ValueError):
            raise EndpointError("endpoint.options must be plain JSON values: they are sent as JSON") from None
        own = sorted(set(self.options) & set(OWN_FIELDS))
        require(not own, f"options sets {', '.join(own)}; these are a run's own, use endpoint.model for the model")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> EndpointSettings:
        """The settings as a profile writes them: every value cast to its kind.

        Raises:
            ValueError: for an unknown name, a missing one, or a value that cannot work.
        """
        hints = get_type_hints(cls)
        if unknown := sorted(map(str, set(values) - set(hints))):
            raise EndpointError(f"unknown endpoint setting {', '.join(unknown)}; valid: {', '.join(hints)}")
        if missing := [name for name in ("url", "model") if name not in values]:
            raise EndpointError(f"endpoint lacks {' and '.join(missing)}")
        as_given = {"key_variable"}  # a failed cast would show its value
        cast = {
            name: value if name in as_given else cast_parameter(f"endpoint.{name}", value, hints[name])
            for name, value in values.items()
        }
        return cls(**cast)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """What so many tokens cost, in the currency of the prices; None without both prices."""
        if self.input_price is None or self.output_price is None:
            return None
        return (prompt_tokens * self.input_price + completion_tokens * self.output_price) / 1e6


def check_endpoint(settings: EndpointSettings) -> None:
    """Say before any work that the package or the key is missing. Nothing is sent.

    Raises:
        EndpointError: naming the package with the command that brings it, or the environment variable.
    """
    _import_openai()
    _read_key(settings)


def _import_openai() -> Any:
    try:
        import openai
    except ImportError:
        raise EndpointError(
            "comparator 'api' needs the package openai: `.venv/bin/python -m pip install -r requirements.txt` brings it"
        ) from None
    return openai


def _read_key(settings: EndpointSettings) -> str:
    name = settings.key_variable
    if name is None:
        return NO_KEY
    key = os.environ.get(name, "")
    if not key:
        raise EndpointError(
            f"the environment variable {name} is not set, and {settings.url} is asked with the key in it; set it in "
            f"the shell that starts the run (export {name}=...), or leave endpoint.key_variable out where no key is "
            "needed"
        )
    if not re.fullmatch("[!-~]+", key):  # it would end up, in full, in the exception about an impossible header
        raise EndpointError(
            f"the environment variable {name} holds white space or a character that no key has, perhaps a line end "
            "that was copied with it; set it again (its value is not shown)"
        )
    if key in json.dumps(asdict(settings)):
        raise EndpointError(
            f"the key in {name} also stands in the settings of the endpoint, which are written to files; take it out "
            "there, the variable is enough"
        )
    return key


# ---------------------------------------------------------------------------------------------------------------------
# Questions and answers
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What one policy is asked once.

    Attributes:
        prompt: the user's message.
        system: the system message before it; empty for none.
        max_tokens: limit on the answer's tokens, as the endpoint counts them.
        temperature, top_p: how it samples.
        draw: a number below DRAWS that tells the samples of one prompt apart. It is sent as the request's seed, which
            not every endpoint heeds.
    """

    prompt: str
    system: str
    max_tokens: int
    temperature: float
    top_p: float
    draw: int

    def request(self, settings: EndpointSettings) -> dict[str, Any]:
        """The body of the request."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        body = {"model": settings.model, "messages": messages, "max_tokens": self.max_tokens}
        body |= {"temperature": self.temperature, "top_p": self.top_p, "seed": self.draw} | settings.options
        return {name: value for name, value in body.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: the message; empty where the model wrote none.
        truncated: the token limit, or the endpoint's filter, ended it.
        prompt_tokens, completion_tokens: as the endpoint counted them, None where it did not say. Hidden reasoning is
            part of the latter.
        model: the name that the endpoint gave the model that answered.
    """

    text: str
    truncated: bool
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str = ""


@dataclass(frozen=True)
class Fault:
    """Why an attempt gave no answer.

    Attributes:
        text: in words.
        may_pass: whether another attempt can succeed.
        wait: seconds that the endpoint asked to wait; None where it did not.
    """

    text: str
    may_pass: bool = True
    wait: float | None = None


def read_answer(body: str) -> Answer | Fault:
    """The answer in the body of a reply; a fault where there is none, whatever the body holds."""
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Fault("a reply that is no chat completion")
    if not isinstance(text, str):
        return Fault(f"a message of kind {type(text).__name__} instead of a text")
    if reason not in ENDED + CUT:
        return Fault(f"an answer that was not finished (finish_reason {reason!r:.40})")
    usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
    model = reply.get("model") if isinstance(reply.get("model"), str) else ""
    counts = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    # JSON can hold half of a surrogate pair, which no tokenizer and no file takes.
    text, model = (part.encode("utf-8", "replace").decode() for part in (text, model))
    return Answer(text, reason in CUT, *counts, model)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks to wait: it holds seconds, or a date. None without a readable one."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(seconds, 0.0)


def back_off(attempts: int, draw: int) -> float:
    """Seconds to wait after so many failed attempts: 1, 2, 4 ... at the most.

    The draw takes up to half off, so that requests that failed together do not come back together.
    """
    return min(FIRST_WAIT * 2.0 ** (attempts - 1), LONGEST_BACKOFF) * (1 + draw / DRAWS) / 2


@dataclass
class Usage:
    """Sums over answers.

    Attributes:
        requests: answers.
        truncated, empty: how many of them were cut, or hold no text.
        prompt_tokens, completion_tokens: as the endpoint counted them.
        uncounted: answers that came without these counts; their tokens are missing above.
    """

    requests: int = 0
    truncated: int = 0
    empty: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0

    def add(self, answer: Answer) -> None:
        self.requests += 1
        self.truncated += answer.truncated
        self.empty += not answer.text.strip()
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.uncounted += None in (answer.prompt_tokens, answer.completion_tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Asking
# ---------------------------------------------------------------------------------------------------------------------


class Endpoint:
    """Asks an endpoint, and counts.

    Every answer is kept in a file whose name is a digest of address, request and draw. Runs on one machine share these
    files; two that ask the same at the same time send it once.

    Args:
        settings: where and how.
        folder: of the kept answers; default: `endpoint` in the cache folder (MAPL_CACHE).
        sleep: called with the seconds of every wait; default: a wait that ends at once when the batch has failed.

    Raises:
        EndpointError: if the package or the key is missing, or nothing can be kept.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        folder: Path | None = None,
        sleep: Callable[[float], object] | None = None,
    ):
        self.settings, self.folder = settings, Path(folder or cache_dir() / "endpoint").expanduser()
        self.sent, self.kept = Usage(), Usage()  # answers that were asked for now, and those from the folder
        self.failed_attempts = 0
        self.models: set[str] = set()  # that answered, by the endpoint's own names
        self._sleep, self._counting = sleep, threading.Lock()
        self._client = _import_openai().OpenAI(
            base_url=settings.url, api_key=_read_key(settings), timeout=settings.timeout, max_retries=0
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EndpointError(f"{self.folder} cannot be made ({error.strerror}); set MAPL_CACHE to another") from None
        if not os.access(self.folder, os.W_OK):
            raise EndpointError(f"{self.folder} cannot be written to; set MAPL_CACHE to another folder")

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in the order of the questions.

        Raises:
            EndpointError: at the first question that cannot be answered, or if the first answers are all used up by
                reasoning. Answers that came until then, or are on their way, are kept.
        """
        stopped = threading.Event()
        pool = ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="endpoint")
        try:
            futures = [pool.submit(self._answer, question, stopped) for question in questions]
            wordless = 0
            with tqdm(total=len(futures), desc=f"asking {self.settings.model}", leave=False, delay=BAR_DELAY) as bar:
                for number, future in enumerate(as_completed(futures), 1):
                    answer = future.result()
                    bar.update()
                    wordless += answer.truncated and not answer.text.strip()
                    if wordless == number == min(FIRST_ANSWERS, len(questions)):
                        raise EndpointError(f"{self._name}: the first {number} answers are empty. {WORDLESS}")
            answers = [future.result() for future in futures]
        except BaseException:
            stopped.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if wordless:
            warnings.warn(f"{self._name}: {wordless} of {len(answers)} answers are empty. {WORDLESS}", stacklevel=2)
        return answers

    def record(self) -> dict[str, Any]:
        """What a manifest says: address, model, and what was asked, with token counts and cost."""

        def counted(usage: Usage) -> dict[str, Any]:
            return asdict(usage) | {"cost": self.settings.cost(usage.prompt_tokens, usage.completion_tokens)}

        return {
            "url": self.settings.url,
            "model": self.settings.model,
            "answered_by": sorted(self.models),
            "sent": counted(self.sent),
            "kept": counted(self.kept),
            "failed_attempts": self.failed_attempts,
        }

    def state(self) -> dict[str, Any]:
        """The counts, for a checkpoint. What is answered after it is on disk: a run that goes on counts it as kept."""
        usage = {"sent": asdict(self.sent), "kept": asdict(self.kept)}
        return usage | {"failed_attempts": self.failed_attempts, "models": sorted(self.models)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sent, self.kept = Usage(**state["sent"]), Usage(**state["kept"])
        self.failed_attempts, self.models = state["failed_attempts"], set(state["models"])

    @property
    def _name(self) -> str:
        return f"{self.settings.model} at {self.settings.url}"

    # -- one question ------------------------------------------------------------------------------------------------

    def _answer(self, question: Question, stopped: threading.Event) -> Answer:
        request = question.request(self.settings)
        asked = {"url": self.settings.url, "request": request, "draw": question.draw}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{digest}.json"
        if (answer := _read_kept(path, asked)) is None:
            # Another run may be asking the same just now: its answer is waited for.
            with folder_lock(self.folder, wait_seconds=math.inf, name=f".{digest}.lock"):
                if (answer := _read_kept(path, asked)) is None:
                    answer = self._ask(request, question.draw, stopped)
                    write_atomically(path, json.dumps({"asked": asked, "answer": asdict(answer)}, indent=1) + "\n")
                    return self._counted(self.sent, answer)
        return self._counted(self.kept, answer)

    def _counted(self, usage: Usage, answer: Answer) -> Answer:
        with self._counting:
            usage.add(answer)
            self.models |= {answer.model} - {""}
        return answer

    def _ask(self, request: Mapping[str, Any], draw: int, stopped: threading.Event) -> Answer:
        attempts = self.settings.retries + 1
        for attempt in range(1, attempts + 1):
            outcome = self._attempt(request)
            if isinstance(outcome, Answer):
                return outcome
            with self._counting:
                self.failed_attempts += 1
            if not outcome.may_pass:
                raise EndpointError(f"{self._name}: {outcome.text}")
            if attempt == attempts:
                break
            wait = back_off(attempt, draw) if outcome.wait is None else outcome.wait
            if wait > LONGEST_WAIT:
                raise EndpointError(
                    f"{self._name}: {outcome.text}, and it asks to wait {wait:.0f} seconds; give the same command "
                    "again after that, it pays for no answer twice"
                )
            (self._sleep or stopped.wait)(wait)
            if stopped.is_set():  # another question of the batch has failed for good: nobody waits for this one
                break
        raise EndpointError(
            f"{self._name}: no answer in {attempt} attempts, at last {outcome.text}; give the same command again later "
            "(it pays for no answer twice), and lower endpoint.concurrency if it is too much for the endpoint"
        )

    def _attempt(self, request: Mapping[str, Any]) -> Answer | Fault:
        """One request. What goes wrong is returned, since the library's exceptions hold the request and its key."""
        openai = _import_openai()
        body = dict(request)
        try:
            reply = self._client.chat.completions.with_raw_response.create(
                model=body.pop("model"), messages=body.pop("messages"), extra_body=body
            )
        except openai.APITimeoutError:
            return Fault(f"silence for {self.settings.timeout:g} seconds")
        except openai.APIConnectionError as error:
            return Fault(f"a connection that failed ({type(error.__cause__).__name__})")
        except openai.APIStatusError as error:
            return self._refusal(error.status_code, error.code, error.response)
        except openai.OpenAIError as error:
            return Fault(f"a failure of the client library ({type(error).__name__})", may_pass=False)
        return read_answer(self._without_key(reply.http_response.content))

    def _refusal(self, status: int, code: str | None, response: Any) -> Fault:
        if status == 401:
            name = self.settings.key_variable
            cure = f"correct the environment variable {name}" if name else "name its variable in endpoint.key_variable"
            return Fault(f"status 401, the key was not accepted; {cure}", may_pass=False)
        said = " ".join(self._without_key(response.content).split())[:300]
        may_pass = (status in MAY_PASS or status >= 500) and code != OUT_OF_CREDIT
        wait = retry_after(response.headers.get("retry-after"), time.time()) if may_pass else None
        return Fault(f"status {status}" + (f" ({said})" if said else ""), may_pass, wait)

    def _without_key(self, body: bytes) -> str:
        """The body as text; an endpoint that repeats what it was sent must not put the key into files or messages."""
        text = body.decode("utf-8", "replace")
        return text.replace(self._client.api_key, HIDDEN) if self.settings.key_variable else text


def _read_kept(path: Path, asked: Mapping[str, Any]) -> Answer | None:
    """The kept answer to this very request; None where there is none that can be read: it is then asked for again."""
    try:
        entry = json.loads(path.read_bytes())
        return Answer(**entry["answer"]) if entry["asked"] == asked else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
