"""Chats that between them take as many turns of a chat template as can be thought of.

Each is a name and the arguments of transformers' `apply_chat_template`. They are data: which template takes which is found
out by trying.
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather. Quotes \"here\", it's <b>bold</b> & 東京, tab\tand\nnewline.",
        "parameters": {
            "type": "object",
            "properties": {
                "z_city": {"type": "string", "description": "City & country, e.g. \"Zürich, CH\""},
                "a_unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "m_days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 3},
                "ratio": {"type": "number", "default": 0.1, "maximum": 1e5, "minimum": -1.5e-7},
                "flags": {"type": "array", "items": {"type": "boolean"}, "default": [True, False, None]},
                "area": {
                    "type": "object",
                    "properties": {
                        "lat": {"type": "number"},
                        "tags": {"type": ["string", "null"], "nullable": True},
                        "points": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                    },
                    "required": ["lat"],
                    "additionalProperties": False,
                },
                "choice": {"anyOf": [{"type": "string"}, {"type": "integer"}], "description": ""},
                "ref": {"$ref": "#/$defs/thing"},
                "mixed": {"oneOf": [{"type": "string", "default": "x"}, {"type": "number"}], "title": "Mixed"},
            },
            "required": ["z_city", "m_days"],
            "$defs": {"thing": {"type": "string"}},
        },
        "return": {"type": "string", "description": "The report"},
    },
}
PLAIN = {
    "type": "function",
    "function": {
        "name": "search.web-2",
        "description": "Search the web.\n\nArgs:\n    query: what for",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
        "strict": True,
    },
}
BARE = {"name": "bare", "description": "Not wrapped.", "parameters": {"type": "object", "properties": {}}}
NO_PARAMETERS = {"type": "function", "function": {"name": "now", "description": "The time."}}
NULLS = {"type": "function", "function": {"name": "nulls", "description": None, "parameters": None}}
TOOLS = [WEATHER, PLAIN]


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def system(content, **fields):
    return {"role": "system", "content": content, **fields}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def tool(content, call="call_0001", **fields):
    return {"role": "tool", "tool_call_id": call, "content": content, **fields}


def call(name, arguments, number=1, **fields):
    identity = f"call_{number:04}"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


ARGUMENTS = {
    "z_city": "Zürich \"old\" town's <b>&</b>",
    "a_unit": None,
    "m_days": 3,
    "ratio": 1e5,
    "small": 1.5e-7,
    "huge": 1.5e15,
    "exact": 12345678901234567890,
    "negative": -42,
    "whole": 3.0,
    "flags": [True, False, None, 1.25, "x", [], {}],
    "area": {"lat": 47.3769, "tags": None, "points": [[1, 2], [3.5, -4.0]], "nested": {"a": {"b": [{"c": 1}]}}},
    "code": "def f(x):\n\treturn \"\\n\" + 'a\\\\b'  # 東京 😀 \u2028\u00a0\x7f",
    "empty": "",
}
ASK = [system("You are helpful."), user("Weather in Zürich and Rome?")]
CALLS = [
    *ASK,
    assistant("", tool_calls=[call("get_weather", ARGUMENTS)]),
    tool("{\"temperature\": 21.5, \"sky\": \"clear\"}", name="get_weather"),
]
PARALLEL = [
    *ASK,
    assistant(
        "I look it up.",
        reasoning_content="Two cities.\nTwo calls.",
        tool_calls=[call("get_weather", {"z_city": "Zürich", "m_days": 1}), call("search.web-2", {"query": "Rome"}, 2)],
    ),
    tool("21", name="get_weather"),
    tool("[{\"title\": \"Rome\"}]", "call_0002", name="search.web-2"),
]
LONG = [
    system("Be brief.\n\nToday is a good day."),
    *(
        message
        for turn in range(6)
        for message in (
            user(f"Question {turn}: what is {turn} + {turn}?  \n"),
            assistant(
                f"\n\nIt is {turn * 2}. ",
                reasoning_content=f"Adding {turn} twice.\n" if turn % 2 else None,
                tool_calls=[call("search.web-2", {"query": f"sum {turn}"}, turn)] if turn == 3 else None,
            ),
            *([tool(f"found {turn}", f"call_{turn:04}", name="search.web-2"), assistant("So it is.")] if turn == 3 else []),
        )
    ),
    user("And then?"),
]
AGENT = [
    system("You are a coding agent."),
    user("Fix the bug."),
    assistant(None, reasoning_content="Look first.", tool_calls=[call("search.web-2", {"query": "grep -n 'x' *.py | head"}, 1)]),
    tool("a.py:1: x = {\n  'k': \"v\"\n}", "call_0001", name="search.web-2"),
    assistant(
        "Found it.",
        reasoning_content="\nNow write.\n",
        tool_calls=[call("search.web-2", {"query": "<tool_call>{}</tool_call>"}, 2), call("get_weather", {}, 3)],
    ),
    tool("", "call_0002", name="search.web-2"),
    tool("<tool_response>\nok\n</tool_response>", "call_0003", name="get_weather"),
    assistant("Done.", reasoning_content="It works."),
    user("Thanks! Anything else?"),
    assistant("<think>\nNo.\n</think>\n\nNo.", reasoning_content=""),
    user("Good."),
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PARTS = [
    system([text("System part one."), text(" Two. ")]),
    user([text("Look at this:"), IMAGE, text("and this"), {"type": "image"}, text("\nWhat is it?")]),
    assistant([text("A "), text("cat.")]),
    user([text("Sure?")]),
]
TEXT_PARTS = [system([text("You see.")]), user([text("One."), text("Two.", cache_control={"type": "ephemeral"})])]

BASE = {
    "plain": {"messages": [user("Hello, world!")]},
    "no generation prompt": {"messages": [user("Hello!")], "add_generation_prompt": False},
    "system": {"messages": ASK},
    "two turns": {"messages": [user("a"), assistant("b"), user("c")]},
    "ends with the assistant": {"messages": [user("a"), assistant("b")], "add_generation_prompt": False},
    "ends with the assistant and a prompt": {"messages": [user("a"), assistant("b")]},
    "white space": {"messages": [system("  a \n"), user("\n\n  b\t \n"), assistant(" \n c \u00a0\n"), user(" ")]},
    "odd characters": {
        "messages": [
            system("<&>'\"\\ {{ x }} {% y %}"),
            user("é e\u0301 東京 😀 \u200b \u2028 \x00 <|im_end|> </s> [INST] <think>"),
            assistant("<tool_call>\n{\"a\": 1}\n</tool_call>"),
            user("\r\nline\rline"),
        ]
    },
    "empty texts": {"messages": [system(""), user(""), assistant(""), user("x")]},
    "null content": {"messages": [user("x"), assistant(None), user("y")]},
    "thought in content": {
        "messages": [
            user("q"),
            assistant("<think>\nfirst\n</think>\n\nanswer one"),
            user("q2"),
            assistant("no thought </think> here"),
            user("q3"),
            assistant("<think>open"),
            user("q4"),
        ]
    },
    "reasoning fields": {
        "messages": [
            user("q"),
            assistant("one", reasoning_content=" why\n"),
            user("q2"),
            assistant("two", reasoning="because"),
            user("q3"),
            assistant("three", thinking="hm"),
            user("q4"),
        ]
    },
    "reasoning in the last turn": {
        "messages": [user("q"), assistant("one", reasoning_content="why\n\n")],
        "add_generation_prompt": False,
    },
    "long": {"messages": LONG, "tools": TOOLS},
    "long without tools": {"messages": [message for message in LONG if message["role"] != "tool"]},
    "agent": {"messages": AGENT, "tools": TOOLS},
    "agent without tools given": {"messages": AGENT},
    "tools": {"messages": ASK, "tools": TOOLS},
    "tools without system": {"messages": [user("Weather?")], "tools": [PLAIN]},
    "all kinds of tools": {"messages": ASK, "tools": [WEATHER, BARE, NO_PARAMETERS, NULLS]},
    "no tools": {"messages": ASK, "tools": []},
    "a call and its result": {"messages": CALLS, "tools": TOOLS},
    "a call in text": {
        "messages": [
            *ASK,
            assistant(None, tool_calls=[call("get_weather", "{\"z_city\": \"Rome\",\n \"m_days\": 2.0}")]),
            tool("18 °C", name="get_weather"),
        ],
        "tools": TOOLS,
    },
    "a call without id or type": {
        "messages": [
            user("w"),
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
            {"role": "tool", "content": "12:00", "name": "now"},
            assistant("It is noon."),
            user("Thanks"),
        ],
        "tools": [NO_PARAMETERS],
    },
    "a bare call": {
        "messages": [user("w"), assistant("", tool_calls=[{"name": "now", "arguments": {"x": 1}}]), tool("12", name="now")],
        "tools": [NO_PARAMETERS],
    },
    "parallel calls": {"messages": PARALLEL, "tools": TOOLS},
    "an answer after parallel calls": {
        "messages": [*PARALLEL, assistant("Both are warm.", reasoning_content="done"), user("Thanks.")],
        "tools": TOOLS,
    },
    "nine letter ids": {
        "messages": [
            user("w"),
            assistant("", tool_calls=[{**call("now", {"tz": "UTC"}), "id": "abcdefgh1"}]),
            tool("12:00", "abcdefgh1", name="now"),
            assistant("Noon."),
            user("Thanks"),
        ],
        "tools": [NO_PARAMETERS],
    },
    "a result that is an object": {
        "messages": [*CALLS[:3], {**CALLS[3], "content": {"temperature": 21.5, "ok": True, "n": None}}],
        "tools": TOOLS,
    },
    "a result in parts": {"messages": [*CALLS[:3], {**CALLS[3], "content": [text("21"), text("clear")]}], "tools": TOOLS},
    "results under other roles": {
        "messages": [
            *CALLS[:3],
            {"role": "ipython", "content": {"output": 21}},
            assistant("ok"),
            {"role": "tool_response", "content": "x"},
            {"role": "observation", "content": "y"},
            {"role": "function", "name": "get_weather", "content": "z"},
        ],
        "tools": TOOLS,
    },
    "tools in the system message": {"messages": [system("s", tools="[{}]"), user("x", functions="f")]},
    "developer": {"messages": [{"role": "developer", "content": "Dev."}, user("x")]},
    "developer and system": {"messages": [system("Sys."), {"role": "developer", "content": "Dev."}, user("x")], "tools": TOOLS},
    "two systems": {"messages": [system("one"), system("two"), user("x"), system("three"), user("y")]},
    "late system": {"messages": [user("x"), assistant("y"), system("now"), user("z")]},
    "the assistant begins": {"messages": [assistant("Welcome."), user("x")]},
    "two users": {"messages": [user("x"), user("y")]},
    "two assistants": {"messages": [user("x"), assistant("y"), assistant("z"), user("w")]},
    "unknown role": {"messages": [{"role": "critic", "content": "No."}, user("x")]},
    "only a system": {"messages": [system("x")]},
    "names": {"messages": [system("s", name="sys"), user("x", name="Ann"), assistant("y", name="Bob"), user("z")]},
    "parts": {"messages": PARTS},
    "text parts": {"messages": TEXT_PARTS},
    "text parts with tools": {"messages": TEXT_PARTS, "tools": TOOLS},
    "one part": {"messages": [user([text("One part.")])]},
    "empty parts": {"messages": [user([]), assistant([]), user([text("")])]},
    "audio and video": {
        "messages": [
            user(
                [
                    {"type": "audio", "audio_url": "a.wav"},
                    {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                    {"type": "video", "video": "v.mp4"},
                    {"type": "video_url", "video_url": {"url": "v"}},
                    text("Describe."),
                ]
            )
        ]
    },
    "documents": {
        "messages": ASK,
        "documents": [
            {"title": "One", "text": "First <doc>.", "doc_id": 1},
            {"title": "Two", "text": "Second.", "contents": "c", "score": 0.5},
        ],
    },
    "documents and tools": {"messages": CALLS, "tools": TOOLS, "documents": [{"title": "One", "text": "First."}]},
    "numbers and truths as content": {"messages": [user(1), assistant(2.5), user(True)]},
    "continued": {
        "messages": [user("Poem?"), assistant("Roses are ")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
# Arguments that templates ask for, each with some chats.
KWARGS = [
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"thinking": False},
    {"thinking": "on", "thinking_budget": 512},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high", "enable_thinking": True},
    {"reasoning_effort": "none"},
    {"thinking_mode": "on", "reasoning": "on"},
    {"clear_thinking": False, "preserve_thinking": True, "preserve_previous_think": True},
    {"truncate_history_thinking": False, "keep_past_thinking": True, "keep_all_reasoning": True},
    {"date_string": "26 Jul 2024", "current_date": "2024-07-26", "today": "2024-07-26"},
    {"tools_in_user_message": False},
    {"tool_choice": "required", "parallel_tool_calls": True, "json_schema": {"type": "object"}},
    {"builtin_tools": ["browser", "python", "code_interpreter", "brave_search"], "model_identity": "You are Bo."},
    {"xml_tools": ["<tool/>"], "python_tools": ["def f(): pass"], "custom_tools": [BARE]},
    {"add_vision_id": True, "do_vision_count": True},
    {"citations": True, "citation_mode": "fast", "safety_mode": "NONE", "grounding": "enabled", "controls": {"length": "short"}},
    {"system_prompt": "Sys.", "user_name": "Ann", "system_message": "SM", "add_default_system": True, "no_thinking": True},
    {"thinking": None, "enable_thinking": None, "tools": None},
]


def chats():
    """All of them, by name."""
    found = {name: {"add_generation_prompt": True, **chat} for name, chat in BASE.items()}
    for index, kwargs in enumerate(KWARGS):
        for name in ("system", "two turns", "thought in content", "agent", "parallel calls", "parts"):
            found[f"{name} {index}"] = {"add_generation_prompt": True, **BASE[name], **kwargs}
    return found
