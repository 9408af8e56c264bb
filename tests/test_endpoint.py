"""The endpoint client: what it sends and keeps, how it meets a bad server, and that the key is written nowhere."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chat_server import completion, cut, drop, echo, good, noise, plain, silence, status

from mapl_core import endpoint as endpoint_module
from mapl_core.endpoint import (
    DRAWS,
    Answer,
    Endpoint,
    EndpointError,
    EndpointSettings,
    Question,
    back_off,
    check_endpoint,
    retry_after,
)

ROOT = Path(__file__).resolve().parent.parent
VARIABLE, MARK = "MAPL_TEST_KEY", "sk-MARKED-7f3a91-not-a-key"


def question(draw: int = 0, prompt: str = "write a title", **changes) -> Question:
    values = {"system": "", "max_tokens": 32, "temperature": 0.7, "top_p": 0.9, **changes}
    return Question(prompt=prompt, draw=draw, **values)


@pytest.fixture
def waits() -> list[float]:
    """The seconds that clients would have waited."""
    return []


@pytest.fixture
def client(chat_server, tmp_path, monkeypatch, waits):
    """Makes clients of the loopback server that keep their answers in one folder and do not wait."""
    monkeypatch.setenv(VARIABLE, MARK)

    def make(**changes) -> Endpoint:
        values = {"url": chat_server.url, "model": "tiny", "key_variable": VARIABLE, "timeout": 10.0, **changes}
        return Endpoint(EndpointSettings(**values), folder=tmp_path / "kept", sleep=waits.append)

    return make


# -- what is sent, what comes back -------------------------------------------------------------------------------------


def test_a_question_is_one_chat_request_and_its_answer_is_read(client, chat_server):
    asked = question(5, system="you are a cat")
    assert client().answer([asked]) == [Answer("the cat", False, 11, 7, "tiny-1")]
    (seen,) = chat_server.requests
    assert seen.path == "/v1/chat/completions" and seen.headers["authorization"] == f"Bearer {MARK}"
    assert seen.body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "you are a cat"},
            {"role": "user", "content": "write a title"},
        ],
        "max_tokens": 32,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
    }


def test_options_add_fields_replace_them_and_leave_them_out(client, chat_server):
    options = {"top_k": 20, "thinking": {"type": "disabled"}, "temperature": 1.0, "seed": None, "max_tokens": None}
    client(options=options | {"max_completion_tokens": 9}).answer([question()])
    (seen,) = chat_server.requests
    assert seen.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "write a title"}],
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "thinking": {"type": "disabled"},
        "max_completion_tokens": 9,
    }


def test_answers_come_in_the_order_of_the_questions(client, chat_server):
    def late_ones_first(handler, seen):
        draw = seen.body["seed"]
        good(str(draw), seconds=0.02 * (draw % 3))(handler, seen)

    chat_server.default = late_ones_first
    answers = client(concurrency=5).answer([question(draw) for draw in range(12)])
    assert [answer.text for answer in answers] == [str(draw) for draw in range(12)]


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True), ("content_filter", True)])
def test_the_finish_reason_says_whether_an_answer_was_cut(client, chat_server, reason, truncated):
    chat_server.default = good(reason=reason)
    (answer,) = client().answer([question()])
    assert answer.truncated is truncated and answer.text == "the cat"


def test_an_endpoint_without_a_key_is_not_sent_one_that_lies_about(client, chat_server, monkeypatch):
    """The library itself would take OPENAI_API_KEY, which is meant for somebody else."""
    monkeypatch.setenv("OPENAI_API_KEY", MARK)
    client(key_variable=None).answer([question()])
    assert MARK not in str(chat_server.requests[0].headers)


def test_as_many_requests_as_allowed_are_under_way_and_never_more(client, chat_server):
    together, under_way, most = threading.Barrier(3), 0, 0

    def three_at_a_time(handler, seen):
        nonlocal under_way, most
        with chat_server.lock:
            under_way += 1
            most = max(most, under_way)
        together.wait(timeout=10)  # breaks if fewer than three ever come together
        with chat_server.lock:
            under_way -= 1
        good()(handler, seen)

    chat_server.default = three_at_a_time
    client(concurrency=3, retries=0).answer([question(draw) for draw in range(9)])
    assert most == 3 and len(chat_server.requests) == 9


# -- a bad server ------------------------------------------------------------------------------------------------------

PASSING = {
    "429": status(429),
    "408": status(408),
    "409": status(409),
    "500": status(500),
    "503": status(503, b"<html>busy</html>", content_type="text/html"),
    "a cut body": cut,
    "a dropped connection": drop,
    "no HTTP": noise,
    "bytes that are no text": plain(bytes(range(256))),
    "bytes of another kind": plain(b"\xff\xfe\x00garbage", "application/octet-stream"),
    "half of a JSON": plain(b'{"choices": [{"message"'),
    "an empty body": plain(b""),
    "JSON that is a list": plain(b"[1, 2]"),
    "JSON null": plain(b"null"),
    "no choices": plain(b'{"object": "chat.completion", "model": "tiny"}'),
    "an empty list of choices": plain(b'{"choices": []}'),
    "choices null": plain(b'{"choices": null}'),
    "a message that is null": plain(b'{"choices": [{"message": null, "finish_reason": "stop"}]}'),
    "content that is a list": good(lambda seen: [{"type": "text"}]),
    "an answer that was not finished": good(reason="insufficient_system_resource"),
    "no finish reason": good(reason=None),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_may_pass_is_met_by_asking_again(client, chat_server, waits, fault):
    chat_server.script.append(PASSING[fault])
    asking = client()
    assert asking.answer([question()]) == [Answer("the cat", False, 11, 7, "tiny-1")]
    assert len(chat_server.requests) == 2 and chat_server.requests[0].body == chat_server.requests[1].body
    assert waits == [0.5] and asking.failed_attempts == 1  # draw 0 takes half off the first second


def test_a_server_that_says_nothing_is_given_up_and_asked_again(client, chat_server, waits):
    chat_server.script.append(silence)
    assert client(timeout=2.0).answer([question()])[0].text == "the cat"
    assert len(waits) == 1


def test_a_server_that_says_when_to_come_back_is_obeyed(client, chat_server, waits):
    chat_server.script += [status(429, Retry_After="7"), status(503, Retry_After="0"), status(429, Retry_After="soon")]
    client().answer([question()])
    assert waits == [7.0, 0.0, 2.0]  # what cannot be read counts as nothing said


def test_a_wait_of_hours_is_not_waited_for(client, chat_server, waits):
    chat_server.default = status(429, Retry_After="7200")
    with pytest.raises(EndpointError, match="status 429.*asks to wait 7200 seconds; give the same command again"):
        client().answer([question()])
    assert waits == [] and len(chat_server.requests) == 1


def test_retry_after_holds_seconds_or_a_date():
    assert retry_after("2.5", now=0.0) == 2.5
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now=1445412450.0) == 30.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now=1445412500.0) == 0.0
    assert retry_after("-1", now=0.0) == 0.0
    assert [retry_after(value, now=0.0) for value in (None, "", "soon", "nan", "Wed, 99 Oct 2015")] == [None] * 5


def test_waits_double_up_to_a_minute_and_the_draw_takes_up_to_half_off():
    assert [back_off(attempts, 0) for attempts in (1, 2, 3, 7, 30)] == [0.5, 1.0, 2.0, 30.0, 30.0]
    assert back_off(1, DRAWS // 2) == 0.75 and 0.999 < back_off(1, DRAWS - 1) < 1.0


def test_a_server_that_stays_bad_is_given_up_after_the_retries(client, chat_server, waits):
    chat_server.default = status(500, b'{"error": {"message": "the engine is dead"}}')
    asking = client(retries=3)
    with pytest.raises(EndpointError, match="tiny at .*no answer in 4 attempts, at last status 500.*engine is dead"):
        asking.answer([question()])
    assert len(chat_server.requests) == asking.failed_attempts == 4 and waits == [0.5, 1.0, 2.0]
    assert list(asking.folder.iterdir()) == [], "a failure is not kept"


def test_nobody_listening_is_told_as_such(client, waits):
    with pytest.raises(EndpointError, match="no answer in 2 attempts, at last a connection that failed"):
        client(url="http://127.0.0.1:9/v1", retries=1).answer([question()])
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, b'{"error": {"message": "max_tokens is too large"}}'), "status 400.*max_tokens is too large"),
        (status(401), f"status 401, the key was not accepted; correct the environment variable {VARIABLE}"),
        (status(402, b'{"error": {"message": "Insufficient Balance"}}'), "status 402.*Insufficient Balance"),
        (status(403), "status 403"),
        (status(404, b'{"error": {"message": "no model tiny"}}'), "status 404.*no model tiny"),
        (status(422), "status 422"),
        (status(429, b'{"error": {"message": "pay first", "code": "insufficient_quota"}}'), "status 429.*pay first"),
    ],
)
def test_a_refusal_is_not_asked_again(client, chat_server, waits, fault, message):
    chat_server.default = fault
    with pytest.raises(EndpointError, match=message):
        client().answer([question()])
    assert len(chat_server.requests) == 1 and waits == []


def test_an_endpoint_that_wants_a_key_and_got_none_is_told_as_such(client, chat_server):
    chat_server.default = status(401)
    with pytest.raises(EndpointError, match="status 401.*name its variable in endpoint.key_variable"):
        client(key_variable=None).answer([question()])


def test_an_empty_answer_is_an_answer_and_is_counted(client, chat_server):
    chat_server.script += [good(""), plain(json.dumps(completion(None)).encode()), good(" \n"), good()]
    asking = client(concurrency=1)
    answers = asking.answer([question(draw) for draw in range(4)])
    assert [answer.text for answer in answers] == ["", "", " \n", "the cat"]
    assert asking.sent.empty == 3 and asking.failed_attempts == 0


def test_a_model_that_only_reasons_is_stopped_before_the_rest_is_paid_for(client, chat_server):
    chat_server.default = good("", reason="length")
    with pytest.raises(EndpointError, match="the first 16 answers are empty.*reasoning off in endpoint.options"):
        client(concurrency=2).answer([question(draw) for draw in range(200)])
    assert len(chat_server.requests) < 40


def test_a_few_answers_lost_to_reasoning_are_a_warning(client, chat_server):
    chat_server.script += [good(), good("", reason="length")]
    with pytest.warns(UserWarning, match="1 of 3 answers are empty.*max_new_tokens"):
        client(concurrency=1).answer([question(draw) for draw in range(3)])


def test_half_a_surrogate_pair_becomes_a_text_that_files_and_tokenizers_take(client, chat_server):
    chat_server.default = plain(json.dumps(completion("cat \ud83d!")).encode())
    (answer,) = client().answer([question()])
    assert answer.text == "cat ?!"


# -- the key -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [echo(200), echo(400), echo(401), echo(403), echo(429), echo(500), *PASSING.values(), silence],
    ids=["echo 200", "echo 400", "echo 401", "echo 403", "echo 429", "echo 500", *PASSING, "silence"],
)
def test_the_key_is_in_no_exception_log_file_or_count(client, chat_server, tmp_path, caplog, capfd, fault):
    """Locals of every frame and every log record of every library are looked through, at their most talkative."""
    caplog.set_level(logging.DEBUG)
    chat_server.default = fault
    asking, told = client(retries=1, timeout=0.3 if fault is silence else 10.0), ""
    try:
        told = repr(asking.answer([question()]))
    except EndpointError as error:
        assert error.__cause__ is None and error.__context__ is None, "the library's exception holds the request"
        told = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        told += repr(error) + repr(vars(error))
    assert chat_server.requests[0].headers["authorization"] == f"Bearer {MARK}"
    told += caplog.text + "".join(repr(vars(record)) for record in caplog.records) + "".join(capfd.readouterr())
    told += repr(asking) + repr(asking.settings) + json.dumps(asking.record()) + json.dumps(asking.state())
    told += "".join(str(file) + file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert MARK.removeprefix("sk-") not in told


def test_an_echoed_key_is_blotted_out_and_the_rest_of_the_text_stays(client, chat_server):
    chat_server.default = echo(200)
    assert client().answer([question()])[0].text.startswith("you sent Bearer [the key] and {")


def test_a_key_that_is_not_set_is_missed_by_the_name_of_its_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(EndpointError, match=f"the environment variable {VARIABLE} is not set.*export {VARIABLE}="):
        check_endpoint(EndpointSettings("http://127.0.0.1:9", "tiny", VARIABLE))
    check_endpoint(EndpointSettings("http://127.0.0.1:9", "tiny"))


@pytest.mark.parametrize("value", [MARK + "\n", f" {MARK}", f"{MARK} {MARK}", MARK + "é"])
def test_a_key_that_no_header_takes_is_refused_without_being_shown(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(EndpointError, match=f"{VARIABLE} holds white space or a character") as caught:
        check_endpoint(EndpointSettings("http://127.0.0.1:9", "tiny", VARIABLE))
    assert MARK not in str(caught.value)


@pytest.mark.parametrize("changes", [{"options": {"extra": MARK}}, {"model": MARK}, {"url": f"http://{MARK}/v1"}])
def test_a_key_that_also_stands_in_the_settings_is_refused_since_those_are_written(monkeypatch, changes):
    monkeypatch.setenv(VARIABLE, MARK)
    values = {"url": "http://127.0.0.1:9", "model": "tiny", "key_variable": VARIABLE, **changes}
    with pytest.raises(EndpointError, match=f"the key in {VARIABLE} also stands in the settings") as caught:
        check_endpoint(EndpointSettings(**values))
    assert MARK not in str(caught.value)


def test_a_missing_package_names_itself_and_the_file_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(EndpointError, match="needs the package openai: .*install -r requirements.txt"):
        check_endpoint(EndpointSettings("http://127.0.0.1:9", "tiny"))


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://host/v1"}, "endpoint.url is 'ftp://host/v1'; it must be an address that begins with https"),
        ({"url": "api.deepseek.com"}, "must be an address that begins with https://"),
        ({"url": "https://"}, "must be an address"),
        ({"url": "http://host:port/v1"}, "must be an address"),
        ({"url": "http://ho st/v1"}, "must be an address"),
        ({"url": "https://host/v1/chat/completions/"}, "leave out /chat/completions"),
        ({"model": ""}, "endpoint.model is empty"),
        ({"concurrency": 0}, "endpoint.concurrency is 0; it must be at least 1"),
        ({"timeout": 0.0}, "endpoint.timeout is 0.0; it must be positive"),
        ({"retries": -1}, "endpoint.retries is -1; it must be at least 0"),
        ({"input_price": -1.0}, "endpoint.input_price is -1.0"),
        ({"output_price": -0.5}, "endpoint.output_price is -0.5"),
        ({"options": {"stream": True, "n": 2}}, "endpoint.options sets n, stream; these are a run's own"),
        ({"options": {"top_k": {1, 2}}}, "endpoint.options must be plain JSON values"),
        ({"options": {"top_k": float("nan")}}, "endpoint.options must be plain JSON values"),
        ({"concurrency": "many"}, "endpoint.concurrency must be a whole number, got 'many'"),
        ({"modle": "tiny"}, "unknown endpoint setting modle; valid: url, model, key_variable"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        EndpointSettings.read({"url": "http://127.0.0.1:9/v1", "model": "tiny", **changes})


@pytest.mark.parametrize("values", [{}, {"url": "http://host"}, {"model": "tiny"}])
def test_address_and_model_are_needed(values):
    with pytest.raises(EndpointError, match="endpoint lacks"):
        EndpointSettings.read(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"url": f"https://user:{MARK}@host/v1"},
        {"url": f"https://host/v1?key={MARK}"},
        {"url": f"https://host/v1#{MARK}"},
        {"key_variable": MARK},
        {"key_variable": [MARK]},
        {"api_key": MARK},
    ],
)
def test_what_may_be_a_key_is_not_shown(changes):
    with pytest.raises(ValueError) as caught:
        EndpointSettings.read({"url": "https://host/v1", "model": "tiny", **changes})
    told = "".join(traceback.TracebackException.from_exception(caught.value).format())
    assert MARK not in told and "endpoint" in str(caught.value)


@pytest.mark.parametrize("url", ["https://api.deepseek.com/", "http://127.0.0.1:8000/v1", "http://[::1]:8000/v1/"])
def test_addresses_that_can_work_are_taken_without_their_last_slash(url):
    settings = EndpointSettings.read({"url": url, "model": "org/model", "timeout": "2", "key_variable": "A_KEY_2"})
    assert settings.url == url.rstrip("/") and settings.timeout == 2.0


def test_cost_is_tokens_times_price_and_unknown_without_both_prices():
    settings = EndpointSettings("http://host", "tiny", input_price=2.0, output_price=8.0)
    assert settings.cost(33, 21) == pytest.approx(234e-6)  # (33 * 2 + 21 * 8) / 1e6
    assert EndpointSettings("http://host", "tiny", input_price=2.0).cost(33, 21) is None


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_what_was_answered_once_is_not_asked_again(client, chat_server):
    asked = [question(draw) for draw in range(3)]
    first, second = client(input_price=2.0, output_price=8.0), client(input_price=1.0, output_price=1.0)
    assert first.answer(asked) == second.answer(asked) and len(chat_server.requests) == 3
    record = first.record()
    assert record["sent"] == {
        "requests": 3, "truncated": 0, "empty": 0, "prompt_tokens": 33, "completion_tokens": 21, "uncounted": 0,
        "cost": pytest.approx(234e-6),
    }  # fmt: skip
    assert record["kept"]["requests"] == 0 and record["answered_by"] == ["tiny-1"]
    assert second.record()["sent"]["requests"] == 0 and second.record()["kept"]["cost"] == pytest.approx(54e-6)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {"draw": 1}),
        ({}, {"prompt": "write a summary"}),
        ({}, {"system": "you are a dog"}),
        ({}, {"max_tokens": 33}),
        ({}, {"temperature": 0.8}),
        ({}, {"top_p": 1.0}),
        ({"model": "other"}, {}),
        ({"options": {"top_k": 20}}, {}),
        ({"options": {"seed": None}}, {"draw": 1}),
    ],
)
def test_another_request_or_another_draw_is_asked(client, chat_server, settings, changes):
    client(options={"seed": None} if "options" in settings else {}).answer([question()])
    client(**settings).answer([question(**changes)])
    assert len(chat_server.requests) == 2


def test_an_option_given_in_another_way_is_the_same_request(client, chat_server):
    client(options={"stop": ("a", "b")}).answer([question()])
    client(options={"stop": ["a", "b"]}).answer([question()])
    assert len(chat_server.requests) == 1


def test_answers_without_token_counts_are_counted_as_such(client, chat_server):
    chat_server.script += [good(usage=None), good(usage={"prompt_tokens": -1, "completion_tokens": True}), good()]
    asking = client(concurrency=1, input_price=1.0, output_price=1.0)
    asking.answer([question(draw) for draw in range(3)])
    assert (asking.sent.uncounted, asking.sent.prompt_tokens, asking.sent.completion_tokens) == (2, 11, 7)


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"asked": {}, "answer": {}}', b"\xff\xfe"])
def test_a_damaged_answer_is_asked_for_again(client, chat_server, damage):
    client().answer([question()])
    (kept,) = client().folder.iterdir()
    kept.write_bytes(damage)
    assert client().answer([question()])[0].text == "the cat"
    assert client().answer([question()])[0].text == "the cat" and len(chat_server.requests) == 2


def test_a_batch_that_fails_has_paid_for_no_answer_in_vain(client, chat_server):
    """Two answers, then a refusal: after it, only what is missing is asked, whoever was still under way."""
    chat_server.script += [good("one"), good("two"), status(400)]
    asked = [question(draw) for draw in range(4)]
    with pytest.raises(EndpointError, match="status 400"):
        client(concurrency=1).answer(asked)
    again = client(concurrency=1)
    assert [answer.text for answer in again.answer(asked)][:2] == ["one", "two"]
    assert len(chat_server.requests) == 5 and again.kept.requests + again.sent.requests == 4


def test_two_clients_that_ask_the_same_at_once_send_it_once(client, chat_server):
    chat_server.default = good(lambda seen: f"answer {seen.body['seed']}", seconds=0.05)
    clients, asked = [client(concurrency=4), client(concurrency=4)], [question(draw) for draw in range(8)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.answer(asked), clients)
    assert first == second == [Answer(f"answer {draw}", False, 11, 7, "tiny-1") for draw in range(8)]
    assert len(chat_server.requests) == 8 == sum(one.sent.requests for one in clients)
    assert len(list(clients[0].folder.iterdir())) == 8, "eight answers, and no lock is left"


@pytest.mark.slow
def test_two_processes_that_ask_the_same_at_once_send_it_once(chat_server, tmp_path):
    chat_server.default = good(lambda seen: f"answer {seen.body['seed']}", seconds=0.3)
    code = """
import sys
from pathlib import Path
from mapl_core.endpoint import Endpoint, EndpointSettings, Question
client = Endpoint(EndpointSettings(sys.argv[1], "tiny", concurrency=2), folder=Path(sys.argv[2]))
print([answer.text for answer in client.answer([Question("write", "", 8, 1.0, 1.0, draw) for draw in range(12)])])
"""
    command = [sys.executable, "-c", code, chat_server.url, str(tmp_path)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=600)[0] for process in both]
    assert printed == [f"{[f'answer {draw}' for draw in range(12)]}\n"] * 2
    assert len(chat_server.requests) == 12


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_asked(client, chat_server, tmp_path):
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(EndpointError, match="kept cannot be made.*set MAPL_CACHE"):
        client()
    assert chat_server.requests == []


def test_counts_go_on_after_a_checkpoint(client):
    first, second = client(), client()
    first.answer([question(0), question(1)])
    second.load_state(json.loads(json.dumps(first.state())))
    second.answer([question(1), question(2)])
    assert (second.sent.requests, second.kept.requests) == (3, 1) and second.record()["answered_by"] == ["tiny-1"]


def test_the_answers_lie_in_the_cache_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path))
    assert Endpoint(EndpointSettings("http://127.0.0.1:9", "tiny")).folder == tmp_path / "endpoint"


def test_a_plan_is_checked_without_torch_and_without_the_library():
    """Settings are judged where a plan of many jobs is made, which must take no more than a second."""
    code = """
import sys
from mapl_core.endpoint import EndpointSettings
EndpointSettings("http://127.0.0.1:9", "tiny")
print(sorted({"torch", "transformers", "openai"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "[]\n"


def test_an_interrupted_batch_ends_at_once_and_sends_nothing_more(client, chat_server, monkeypatch):
    chat_server.default = good(seconds=0.1)

    def interrupted(futures):
        next(real(futures))
        raise KeyboardInterrupt

    real = endpoint_module.as_completed
    monkeypatch.setattr(endpoint_module, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client(concurrency=2).answer([question(draw) for draw in range(50)])
    assert len(chat_server.requests) <= 6
