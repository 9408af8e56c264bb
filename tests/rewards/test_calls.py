"""Reading function calls out of what models write: Python in any surroundings, JSON, fences, tags, damaged text."""

from __future__ import annotations

import json
import warnings

import pytest
from timing import within

from mapl_core.rewards.call_types import Functions
from mapl_core.rewards.calls import read_calls

SCHEMAS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "dict",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {
        "name": "geo.area",
        "parameters": {
            "type": "dict",
            "properties": {"scale": {"type": "float"}, "points": {"type": "array"}},
            "required": ["points"],
        },
    },
    {"name": "area", "parameters": {"type": "dict", "properties": {"x": {"type": "any"}}, "required": ["x"]}},
    {"name": "stop", "parameters": {"type": "dict", "properties": {}, "required": []}},
]
FUNCTIONS = Functions(SCHEMAS)
P, T = 'get_weather(city="Paris")', 'get_weather(city="Tokyo")'
PARIS, TOKYO = ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})


def read(text):
    return [(call.name, dict(call.arguments)) for call in read_calls(text, FUNCTIONS).calls]


def unknown(text):
    return read_calls(text, FUNCTIONS).unknown


def value(expression):
    """The value that `area(x=...)` is given."""
    ((name, arguments),) = read(f"area(x={expression})")
    assert name == "area" and list(arguments) == ["x"]
    return arguments["x"]


# Nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [None, "", "  \n", "[]", "[ ]", "[\n\n]", "```\n[]\n```", "```python\n[ ]", "None.", "<think>" + P]
)
def test_blank_text_and_an_empty_list_are_no_calls(text):
    assert read(text) == []
    assert unknown(text) == 0


# Python calls in any surroundings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{P}\n{T}",
        f"{P} {T}",
        f"{P};{T}",
        f"[{P}, {T}]",
        f"[\n  {P},\n  {T},\n]",
        f"1. {P}\n2. {T}",
        f"1.{P}\n2.{T}",
        f"- {P}\n* {T}",
        f"-{P}\n*{T}",
        f"I'll call:\n{P}\nand, since it's asked for,\n{T}\nDone!",
        f"a = {P}\nb={T}",
        f"print({P})\nprint({T})",
        f"run([{P}], max(1, {T}))",
        f"`{P}` and **{T}**",
        f"# calls (two)\n{P}  # the user's city\n{T}",
        "get_weather (city = 'Paris')\nget_weather( city='Tokyo' )",
        'get_weather(\n    city=\'Paris\',  # the user\'s (first) city\n)\nget_weather(\n\tcity="""Tokyo""",)',
        f"Call get_weather twice (once a city): {P} then {T} (that is all).",
        f"\ufeff{P}\r\n{T}\r",
        f"<think>perhaps get_weather('Rome')?</think>{P}\n{T}",
        f"https://x.org/a(b) {P} f(x {T}",
        f"don't {P} \"open {T}",
        f"「{P}」→{T}",
    ],
)
def test_every_outermost_call_is_read_whatever_stands_around_it(text):
    assert read(text) == [PARIS, TOKYO]


@pytest.mark.parametrize(
    "text",
    [
        "my_get_weather('x')",
        "get_weather2('x')",
        "get_weathers('x')",
        "tools.get_weather('x')",
        "f().get_weather('x')",
        "x[0].get_weather('x')",
        "def get_weather(city): pass",
        "def get_weather(city='Paris'):\n    return city",
        "async def  get_weather(city): ...",
        "get_weather",
        "get_weather.city('x')",
        "get_weather: (city)",
        "Get_Weather('x')",
        "geo.Area(1)",
        "x.geo.area(1)",
    ],
)
def test_what_is_no_whole_name_of_a_function_or_a_definition_is_no_call(text):
    assert read(text) == []


@pytest.mark.parametrize("prefix", ["undef ", "x_def ", "def\n"])
def test_only_the_word_def_before_a_name_makes_a_definition(prefix):
    assert read(prefix + P) == [PARIS]


def test_the_longest_name_is_read():
    assert read("geo.area([1])") == [("geo.area", {"points": [1]})]
    assert read("area([1])") == [("area", {"x": [1]})]


def test_an_underscore_may_be_written_for_a_dot_where_only_one_function_can_be_meant():
    assert read("geo_area([1])") == [("geo.area", {"points": [1]})]
    ambiguous = Functions([{"name": name} for name in ("a.b_c", "a_b.c")])
    assert read_calls("a_b_c()", ambiguous).calls == []
    taken = Functions([{"name": name} for name in ("a.b", "a_b")])
    assert [call.name for call in read_calls("a_b() a.b()", taken).calls] == ["a_b", "a.b"]


def test_a_call_inside_a_call_is_the_source_text_of_its_argument():
    assert read(f"get_weather(city={T}, unit=lookup('x'))") == [("get_weather", {"city": T, "unit": "lookup('x')"})]


# Arguments --------------------------------------------------------------------------------------------


def test_positional_arguments_fill_the_required_parameters_then_the_others_in_schema_order():
    assert read("get_weather('Paris', 'celsius', 3)") == [
        ("get_weather", {"city": "Paris", "unit": "celsius", "days": 3})
    ]
    assert read("geo.area([1], 2.5)") == [("geo.area", {"points": [1], "scale": 2.5})]


def test_surplus_positional_arguments_stay_as_extra_arguments():
    ((_, arguments),) = read("area(1, 2, 3)")
    assert arguments["x"] == 1 and len(arguments) == 3
    ((_, arguments),) = read("stop(1)")
    assert len(arguments) == 1


def test_of_a_repeated_keyword_the_last_one_counts():
    assert read("area(x=1, x=2)") == [("area", {"x": 2})]
    assert read("area(1, x=2)") == [("area", {"x": 2})]


def test_a_literal_dict_behind_two_stars_is_merged_and_anything_else_there_is_ignored():
    assert read("get_weather(**{'city': 'Paris'})") == [PARIS]
    assert read("get_weather(city='Paris', **options)") == [PARIS]
    assert read("get_weather(city='Paris', **{1: 2})") == [PARIS]


# Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'it\\'s (one) ) [x'", "it's (one) ) [x"),
        ('"a \\"b\\" {c}"', 'a "b" {c}'),
        ("'null, true'", "null, true"),
        ("'true'", "true"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("True", True),
        ("-3", -3),
        ("+3", 3),
        ("- 2.5e-3", -2.5e-3),
        ("1_000", 1000),
        ("0x10", 16),
        ("'a' 'b'", "ab"),
        ('"""two\nlines"""', "two\nlines"),
        ("r'\\d'", "\\d"),
        ("'\\d'", "\\d"),
        ("'caf\\u00e9 \\n'", "café \n"),
        ("'日本 (東京)'", "日本 (東京)"),
        ("'# no comment'", "# no comment"),
        ("[1, 'a', null, [true]]", [1, "a", None, [True]]),
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("()", []),
        ("{'a': {\"b\": [1]}, 2: false}", {"a": {"b": [1]}, 2: False}),
        ("{key: 1}", {"key": 1}),
        ("Paris", "Paris"),
        ("x**2 + 3*(x - 1)", "x**2 + 3*(x - 1)"),
        ("lambda x: x > 'é'", "lambda x: x > 'é'"),
        ("'é' + name", "'é' + name"),
        ("[a.b, f(1)]", ["a.b", "f(1)"]),
        ("{1, 2}", "{1, 2}"),
        ("{**other}", "{**other}"),
        ("f'{x}'", "f'{x}'"),
        ("b'x'", "b'x'"),
        ("1j", "1j"),
        ("...", "..."),
        ("-True", "-True"),
        ("not x", "not x"),
        ("f(\n  1,\n  2)", "f(\n  1,\n  2)"),
        ("'x' if True else 'y'", "'x' if True else 'y'"),
    ],
)
def test_literals_are_read_and_any_other_expression_is_its_source_text(expression, expected):
    found = value(expression)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "broken",
    [
        "get_weather(city=)",
        'get_weather(city: "Paris")',
        "get_weather(city='a', 'b')",
        "get_weather(a b)",
        "get_weather(city=']')}",
        "get_weather(city=[)",
        "get_weather(city={[1]: 2})",
        "get_weather(city={{}: 2})",
        "get_weather('a\0b')",
        "get_weather('\ud800')",
        "get_weather(city=" + "[" * 100 + "]" * 100 + ")",
        "get_weather(city=" + "-" * 5000 + "1)",
        "get_weather(city=" + "a." * 3000 + "b)",
        "get_weather(city=" + "not " * 3000 + "b)",
        "get_weather(city=" + "9" * 5000 + ")",
        "get_weather(see below)",
    ],
)
def test_a_call_that_cannot_be_read_is_dropped_alone(broken):
    calls = read(f"{P}\n{broken}\n{T}")
    assert (calls[0], calls[-1]) == (PARIS, TOKYO)
    assert len(calls) == (3 if "']')}" in broken else 2)  # that one is sound, with a brace behind it


def test_escapes_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value("'\\d \\%'") == "\\d \\%"


# Cut off ----------------------------------------------------------------------------------------------


def test_of_a_text_cut_anywhere_in_the_second_call_the_first_one_stays():
    for length in range(len(P), len(P + T)):
        assert read((P + T)[:length]) == [PARIS]


@pytest.mark.parametrize("opening", ["[", ""])
def test_of_json_calls_cut_off_anywhere_the_complete_ones_stay(opening):
    paris, tokyo = (json.dumps(forms(city)["arguments"]) for city in ("Paris", "Tokyo"))
    text = f"{opening}{paris}, {tokyo}"
    complete = len(opening + paris)
    assert [read(text[:length]) for length in range(complete)] == [[]] * complete
    assert all(read(text[:length]) == [PARIS] for length in range(complete, len(text)))
    assert read(text) == [PARIS, TOKYO]
    tagged = f"<tool_call>{paris}</tool_call>\n<tool_call>{tokyo}"
    assert all(read(tagged[:length]) == [PARIS] for length in range(tagged.index("</"), len(tagged)))
    fenced = f"```json\n{paris}\n```"
    assert all(read(fenced[:length]) == [PARIS] for length in range(fenced.index("\n```"), len(fenced)))


@pytest.mark.parametrize(
    "text",
    [
        f'get_weather(city="Par\n{P}\n{T}',
        f"get_weather(city='Rome'\n{P}\n{T}",
        f"get_weather(city=[1, 2\n{P}\n{T}\nget_weather(",
        f"{P}\nget_weather(city='''Par\n{T}",
    ],
)
def test_a_call_that_is_never_closed_does_not_hide_the_calls_of_later_lines(text):
    assert read(text) == [PARIS, TOKYO]


def test_a_call_inside_a_call_that_was_cut_off_is_not_read():
    assert read(f"{P}\nget_weather(city={T}") == [PARIS]


def test_at_most_20000_characters_are_read():
    assert read(" " * (20_000 - len(P)) + P) == [PARIS]
    assert read(" " * (20_001 - len(P)) + P) == []
    assert read("<think>" + "x" * 30_000 + "</think>" + P) == [PARIS]  # a thought does not count


# Fences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{P}\n{T}\n```",
        f"```python\n{P}\n{T}\n```",
        f"Sure:\n```py\n{P}\n{T}\n```\nDone: get_weather('Rome')",
        f"get_weather('Rome')\n```tool_code\n{P}\n{T}",
        f"```python\n{P}\n```\nand\n```\n{T}\n```",
        f"````\n{P}\n{T}\n````",
        f"```{P}\n{T}```",
        f"```python {P} {T}```",
        '```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}]\n```\n```\n' + T + "\n```",
        '```json [{"get_weather": {"city": "Paris"}}, {"get_weather": {"city": "Tokyo"}}]```',
        "```get_weather (city='Paris')\n" + T + "```",
    ],
)
def test_with_a_fence_only_what_it_holds_is_read(text):
    assert read(text) == [PARIS, TOKYO]


def test_a_fence_without_a_call_hands_over_to_the_whole_text_without_its_marks():
    assert read(f"{P}\n```\nno call here\n```\n{T}") == [PARIS, TOKYO]
    assert read(f"{P}\n``````{T}") == [PARIS, TOKYO]
    assert read(f"```\nget_time()\n```\n{P}") == [PARIS]
    assert read("get_weather(\n```\ncity='Paris')") == [PARIS]


def test_a_fenced_empty_list_is_an_answer():
    assert read(f"{P}\n```\n[]\n```\n{T}") == []


# JSON -------------------------------------------------------------------------------------------------


def dumps(*values):
    return "\n".join(map(json.dumps, values))


def forms(city):
    arguments = {"city": city}
    return {
        "arguments": {"name": "get_weather", "arguments": arguments},
        "parameters": {"name": "get_weather", "parameters": arguments},
        "text": {"name": "get_weather", "arguments": json.dumps(arguments)},
        "openai": {"id": "1", "function": {"name": "get_weather", "arguments": json.dumps(arguments)}},
        "function": {"function": "get_weather", "arguments": arguments},
        "key": {"get_weather": arguments},
    }  # fmt: skip


@pytest.mark.parametrize("form", forms("x"))
def test_every_json_form_of_a_call_is_read_alone_in_rows_and_in_lists(form):
    paris, tokyo = forms("Paris")[form], forms("Tokyo")[form]
    for text in (
        dumps(paris, tokyo),
        dumps([paris, tokyo]),
        json.dumps([paris, [tokyo]], indent=2),
        f"{json.dumps(paris)},\n{json.dumps(tokyo)}",
        f"{json.dumps(paris)}{json.dumps(tokyo)}",
        f"<tool_call>\n{json.dumps(paris)}\n</tool_call>\n<tool_call>{json.dumps(tokyo)}</tool_call>",
        f"I call:<tool_call>{dumps(paris, tokyo)}",
        f"<tool_call>\n```json\n{dumps([paris, tokyo])}\n```\n</tool_call>",
        f"```json\n{dumps([paris, tokyo])}\n```",
        f"```\n<tool_call>{json.dumps([paris, tokyo])}</tool_call>\n```",
    ):
        assert read(text) == [PARIS, TOKYO], text


def test_one_json_object_may_hold_several_functions_as_keys():
    assert read('{"get_weather": {"city": "Paris"}, "stop": {}, "note": {"x": 1}}') == [PARIS, ("stop", {})]


def test_json_calls_may_leave_out_empty_arguments():
    for text in ('{"name": "stop"}', '{"name": "stop", "arguments": null}', '{"name": "stop", "arguments": ""}'):
        assert read(text) == [("stop", {})]


def test_json_values_keep_their_types():
    text = '{"name": "area", "arguments": {"x": [1, 2.5, true, null, "null", {"k": "(\\u00e9)"}]}}'
    assert read(text) == [("area", {"x": [1, 2.5, True, None, "null", {"k": "(é)"}]})]


@pytest.mark.parametrize("arguments", ['"not json"', "[1]", "7", '"[1]"'])
def test_a_json_call_whose_arguments_are_no_object_is_dropped_alone(arguments):
    text = (
        f'[{{"name": "stop", "arguments": {arguments}}}, {{"name": "get_weather", "arguments": {{"city": "Paris"}}}}]'
    )
    assert read(text) == [PARIS]


def test_json_names_follow_the_same_rules():
    assert read('{"name": "geo_area", "arguments": {"points": [1]}}') == [("geo.area", {"points": [1]})]
    assert unknown('[{"name": "get_time", "arguments": {}}, {"function": "x.y"}]') == 2


def test_json_inside_a_python_call_is_never_read_as_a_call():
    inner = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    assert read(f"area(x={inner})") == [("area", {"x": json.loads(inner)})]
    assert read(f"other(x={inner})") == []


def test_json_with_anything_around_it_is_not_read():
    assert read('Here: {"name": "stop", "arguments": {}}') == []
    assert read('{"name": "stop", "arguments": {}} as asked') == []


def test_a_list_of_calls_in_quotes_is_read_as_python():
    assert read(json.dumps(["get_weather(city='Paris')", "get_weather(city='Tokyo')"])) == [PARIS, TOKYO]


def test_python_calls_in_tags_are_read_too():
    assert read(f"<tool_call>{P}</tool_call><tool_call>{T}</tool_call>") == [PARIS, TOKYO]
    mixed = f'<tool_call>{{"get_weather": {{"city": "Paris"}}}}</tool_call><tool_call>{T}</tool_call>'
    assert read(mixed) == [PARIS, TOKYO]


def test_an_empty_list_in_tags_is_an_answer():
    assert read(f"<tool_call>[]</tool_call> {P}") == []


# Other functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("get_time(city='Rome')", 1),
        ("1.get_time()\n2. a.b(1)", 2),
        ("get_time(other(1), third(2))", 1),  # outermost ones only
        (f"print({P})", 0),  # a wrapper of a call that is read
        (f"get_time(1)\n{P}\nget_time(2)", 2),
        ("tools.get_weather('Paris')", 1),
        ("def get_time(): pass", 0),
        ("if (x) and not(y): print (z)", 0),
        ("see (this) or f(that was prose)", 0),
        ("get_time(", 0),
        ("get_time(a b)", 0),
    ],
)
def test_calls_of_other_functions_are_only_counted(text, count):
    assert unknown(text) == count


# Hostile text -----------------------------------------------------------------------------------------

HOSTILE = {
    "never closed, on lines": "get_weather(\n" * 2000,
    "never closed, on one line": "get_weather(" * 2000,
    "open strings": "get_weather('''\n" * 1500,
    "deep brackets": "get_weather(" + "[" * 9000 + "]" * 9000 + ")",
    "deep dicts": "get_weather(" + "{1:" * 5000,
    "deep JSON": "[" * 20_000,
    "deep JSON objects": '{"a":' * 4000,
    "deep JSON in a text": json.dumps({"name": "stop", "arguments": "[" * 15_000}),
    "a long number": "get_weather(" + "9" * 19_000 + ")",
    "a long hexadecimal number": "get_weather(0x" + "f" * 19_000 + ")",
    "a long JSON number": '{"name": "stop", "arguments": {"x": ' + "9" * 19_000 + "}}",
    "signs": "get_weather(" + "-" * 19_000 + "1)",
    "words": "get_weather(" + "not " * 4500 + "1)",
    "lambdas": "get_weather(" + "lambda:" * 2500 + "1)",
    "conditions": "get_weather(" + "1 if 1 else " * 1500 + "1)",
    "powers": "get_weather(" + "1**" * 6000 + "1)",
    "subscripts": "get_weather(a" + "[0]" * 6000 + ")",
    "calls of calls": "get_weather(a" + "()" * 9000 + ")",
    "f-strings": "get_weather(f'" + "{" * 9000 + "')",
    "very many calls": "".join(f"get_weather({number})" for number in range(1200)),
    "very many other calls": "a(1)" * 5000,
    "very many JSON calls": '{"name":"stop"}' * 1300,
    "very many fences": "```" * 6000,
    "very many tags": "<tool_call>" * 1800,
    "brackets": "(" * 20_000,
    "blanks": " " * 19_000 + "(",
    "commas": "get_weather(" + "1," * 9000 + ")",
    "quotes": "get_weather(" + "'" * 19_000 + ")",
    "escapes": "get_weather('" + "\\" * 19_000,
    "a thought": "<think>" * 3000,
    "ten million characters": P * 400_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_read_in_bounded_time_and_without_an_exception(name):
    within(1.0, lambda: read_calls(HOSTILE[name], FUNCTIONS))


def test_nothing_is_executed(tmp_path):
    target = tmp_path / "made"
    text = f"get_weather(city=open({str(target)!r}, 'w'))\n" + json.dumps({"name": "stop", "arguments": "exit()"})
    assert read(text)[0][0] == "get_weather"
    assert not target.exists()
