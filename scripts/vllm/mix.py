"""The two hundred requests that check.py sends: every API and every way of writing a prompt that an engine takes and the
filter reads.

Only what is sent. Nothing here knows what should come back.
"""

import dataclasses
import random

CHAT = "/v1/chat/completions"
CHAT_BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"

# Where a body has what was said before; a text there is continued as a text.
SAID = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES: "messages", GENERATE: "token_ids"}

MODEL = "tiny"
# The second name of the same model, in the engines and in the filter's configuration.
ALIAS = "tiny-alias"

# How the answer comes: one document; events; events and the usage at the end.
JSON, STREAM, USAGE = "json", "stream", "stream+usage"


@dataclasses.dataclass
class Step:
    """One request. `thread` names the conversation it continues: what was said there goes in front of it."""

    kind: str
    path: str
    body: dict
    mode: str = JSON
    thread: str = ""
    # Whether the engine's account of its cache speaks of this prompt alone.
    comparable: bool = True
    # Prompts in the body. Of a batch, what the engine counts is all of them; it is asked for the first one's ids.
    prompts: int = 1


SENTENCES = [
    "The ferry to the outer islands leaves at 6:40 and takes the mail, two cars and whoever is awake.",
    "Every valve on the lower deck was opened, cleaned with vinegar, and closed again before noon.",
    "Nobody had told the new gardener that the tulips were plastic.",
    "In 1987 the bridge carried 3,412 lorries a day; by 2019 it was 11,960, and the noise had doubled.",
    "She kept a ledger of borrowed books: title, borrower, date, and the excuse.",
    "A kettle, a map, three candles and half a loaf were all that the hut contained.",
    "If the pressure falls below 2.5 bar, stop the pump, wait ten minutes, and call the harbour office.",
    "The committee agreed on the colour of the doors and on nothing else.",
    "Our neighbour's clock is eleven minutes fast, which he regards as a kind of politeness.",
    "Snow covered the tracks within the hour, so the search was left until morning.",
    "Good bread needs flour, water, salt, and a cook who is willing to be bored.",
    "They measured the well twice and got 18.25 m both times, to everyone's surprise.",
]


def prose(seed, sentences):
    """A text of about 20 tokens a sentence that no other seed gives, from its first words on."""
    chance = random.Random(seed)
    return f"Report {seed}: " + " ".join(chance.choice(SENTENCES) for _ in range(sentences))


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def developer(content):
    return {"role": "developer", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def chat(kind, messages, mode=JSON, thread="", comparable=True, **more):
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    return Step(kind, CHAT, body, mode, thread, comparable)


def complete(kind, prompt, mode=JSON, thread="", comparable=True, **more):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    return Step(kind, COMPLETIONS, body, mode, thread, comparable)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather at a place, now or on a day of this week. Says \"unknown\" where it isn't known.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Town, e.g. Zürich or 札幌"},
                "day": {"type": "string", "enum": ["now", "mon", "tue"], "default": "now"},
                "limits": {"type": "array", "items": {"type": "number", "minimum": -1e2, "maximum": 1.5}},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
BARE = {"type": "function", "function": {"name": "lights_off"}}
WIDE = {
    "type": "function",
    "x-owner": "not for the model",
    "function": {"name": "search", "strict": False, "parameters": {"zeta": 1, "alpha": {"<&'>": None}}, "x": 2},
}


def called(arguments, call="call_1", content=None, name="weather"):
    function = {"name": name, "arguments": arguments}
    return assistant(content, tool_calls=[{"id": call, "type": "function", "function": function}])


def result(content, call="call_1"):
    return {"role": "tool", "tool_call_id": call, "content": content}


def conversations(end_id):
    """Eleven threads in which a later turn has the earlier ones and their answers in front of it."""
    # The end of turn cannot be sampled before the 21st token and must be then: the other way for an answer to end.
    ends = {"max_tokens": 40, "min_tokens": 20, "logit_bias": {str(end_id): 100}}
    tools = {"tools": [WEATHER]}
    parts = [{"type": "text", "text": prose(16, 18)}, {"type": "text", "text": "Which of these is a lie?"}]
    openings = [
        ([user(prose(11, 22))], [JSON, JSON, USAGE], {}),
        ([system(prose(12, 26)), user("What does the report say?")], [USAGE, USAGE, JSON], {}),
        ([user(prose(13, 20) + "\n日本語でも答えてください。")], [STREAM, JSON, USAGE], {}),
        ([system("Be brief."), user(prose(14, 22))], [USAGE, JSON, USAGE], ends),
        ([user(prose(15, 22))], [JSON, USAGE, JSON], {"cache_salt": "tenant-7"}),
        ([user(parts)], [JSON, USAGE, USAGE], {}),
        ([user(prose(17, 18))], [USAGE, JSON, JSON], tools),
        ([developer(prose(18, 18)), user("Go on.")], [STREAM, USAGE, JSON], {"max_tokens": 70}),
    ]
    questions = ["And then?", "Give one more example, please, and say why it matters: (a) or (b)?"]
    for number, (messages, modes, more) in enumerate(openings):
        thread = f"chat {number + 1}"
        turns = [messages] + [[user(question)] for question in questions]
        kind = "conversation"
        yield [chat(kind, turn, mode, thread, **{"max_tokens": 40, **more}) for turn, mode in zip(turns, modes)]
    for number, modes in enumerate([(JSON, USAGE), (STREAM, JSON)]):
        thread = f"text {number + 1}"
        prompts = [prose(21 + number, 20), " Thereupon the keeper wrote:"]
        yield [
            complete("completion, continued", prompt, mode, thread, max_tokens=45)
            for prompt, mode in zip(prompts, modes)
        ]


def chats():
    """Single chats, each in a thread of its own."""
    texts = [
        ("Hello!", JSON),
        ("", USAGE),
        (prose(31, 60), USAGE),
        ("Ünïcödé, e\u0301 and é, ﬁ, №½, ｆｕｌｌ; 한국어 문장, مرحبا بالعالم, हिन्दी में, Ещё один. " * 3, JSON),
        ("👩‍👩‍👧‍👦 🇩🇪 ✅ \u200b\ufeff\u00a0|\u2028| zero\u200dwidth 🏳️‍🌈 " * 4, USAGE),
        ("for i in range(10):\n\tif x[i] != 0xFF:\r\n        print(f\"{i:>4}\")  # --------------\n\n\n" * 3, STREAM),
        ("   leading, trailing and   inner   blanks \t \n \n  ", JSON),
        ("What do <|im_end|> and <|eot_id|> mean, and <|endoftext|> or <tool_call>? " * 3, USAGE),
        ("<think>\nnot a thought\n</think>\n\n1234567890 12,345.67 1e5 -0.0 ½ ٣ " * 3, JSON),
        ('{"a": [1, 2.0, null, true], "b\\n": "\\u00e9 \\" \\\\"} & <b>\'it\'s\'</b> ' * 3, STREAM),
    ]
    for text, mode in texts:
        yield [chat("chat, one message", [user(text)], mode)]
    yield [chat("chat, one message", [user(prose(32, 6))], JSON, comparable=False, n=2, temperature=1)]
    yield [chat("chat, one message", [user(prose(33, 6))], USAGE, seed=7, temperature=1, top_p=0.9, stop=["zzz"])]


def shared_prefixes():
    """A long system prompt with one question after another, under either name of the model."""
    for seed, length in [(41, 30), (42, 12)]:
        names = [MODEL, ALIAS, None, MODEL]
        yield [
            chat("system prompt, shared", [system(prose(seed, length)), user(f"Question {number}?")], mode, model=name)
            for number, (name, mode) in enumerate(zip(names, [JSON, USAGE, JSON, USAGE]))
        ]


def roles():
    history = [user("One?"), assistant("Two."), user(prose(54, 5))]
    bodies = [
        ([system("  Trim me?\n"), user(prose(51, 5))], USAGE),
        ([developer(prose(52, 5)), user("Yes?")], JSON),
        ([system("First."), developer("Second."), user("Third."), system("Fourth.")], JSON),
        ([system(prose(53, 4)), *history], STREAM),
        ([system(""), *history, assistant("  Three. \n"), user("Four?")], USAGE),
        ([user("Named."), assistant("So?", name="bob"), {"role": "user", "content": prose(55, 5), "name": "al"}], JSON),
        ([system("x-anthropic-billing-header: cc_version=1;\nReal."), user(prose(56, 5))], USAGE),
        ([user("A"), user("B"), assistant("C"), assistant("D"), user(prose(57, 5))], JSON),
    ]
    for messages, mode in bodies:
        yield [chat("chat, roles", messages, mode)]


def parts():
    def text(value):
        return {"type": "text", "text": value}

    bodies = [
        ([user([text("One part. " + prose(61, 4))])], JSON),
        ([system([text("S1"), text("S2")]), user([text("U1"), text(prose(62, 4) + " Or so"), text("")])], USAGE),
        ([user([text("U1"), text("\n\n"), text("U2")]), assistant([text("A1"), text("A2\n")]), user("So?")], JSON),
        ([user([{"type": "text", "text": prose(63, 3), "cache_control": {"type": "ephemeral"}}])], STREAM),
        ([user(prose(64, 3)), assistant(None), user("Nothing?")], USAGE),
        ([user(prose(65, 3)), assistant("", reasoning_content="I thought.\n"), user([text("日本 "), text(" 語")])], JSON),
    ]
    for messages, mode in bodies:
        yield [chat("chat, content parts", messages, mode)]


def tools():
    asked = user(prose(71, 3) + " Will it rain in Zürich?")
    parts = [{"type": "text", "text": "wet"}, {"type": "text", "text": "cold"}]
    dark = [called("{}", "call_2", name="lights_off"), result("ok", "call_2")]
    bodies = [
        ([asked], [WEATHER], JSON, {}),
        ([asked], [WEATHER, BARE, WIDE], USAGE, {"tool_choice": "auto"}),
        ([system(prose(72, 3)), asked], [BARE], JSON, {"tool_choice": "none"}),
        ([asked, called('{"place": "Zürich", "day": "mon"}'), result("rain, 4.50 °C")], [WEATHER], USAGE, {}),
        ([asked, called('{"b":1e5,"a":[1.0,true,null]}', content="Hm."), result('{"mm": 3}')], [WEATHER], JSON, {}),
        ([asked, called("not json"), result("error")], [WEATHER], STREAM, {}),
        ([asked, called(""), result(parts)], [WEATHER], JSON, {}),
        ([asked, called('{"place": "札幌"}'), result("snow"), assistant("Snow."), user("So?")], [WEATHER], USAGE, {}),
        ([asked, called('{"place":"Bern"}'), result("sun"), *dark], [WEATHER, BARE], JSON, {"seed": 3}),
        ([asked, called('{"place": "Bern"}', content="Hm."), result("fog"), user("And?")], None, USAGE, {}),
    ]
    for messages, given, mode, more in bodies:
        more = more if given is None else {"tools": given, **more}
        yield [chat("chat, tools", messages, mode, **more)]


def template_arguments():
    started = [user(prose(81, 4)), assistant("The answer is")]
    final = {"add_generation_prompt": False, "continue_final_message": True}
    thinks = {"enable_thinking": True, "unknown": [1, {"a": 2}]}
    dated = {"date_string": "29 Feb 2028", "tools_in_user_message": False}
    bodies = [
        ([user(prose(82, 4))], JSON, {"chat_template_kwargs": {"enable_thinking": False}}),
        ([user(prose(83, 4))], USAGE, {"chat_template_kwargs": thinks}),
        ([user(prose(84, 4))], JSON, {"chat_template_kwargs": dated, "tools": [BARE]}),
        (started, USAGE, final),
        ([*started[:1], assistant("Two lines:\n\n1. first")], JSON, {**final, "max_tokens": 20}),
        ([user(prose(85, 4)), assistant("Done.")], JSON, {"add_generation_prompt": False}),
        ([user(prose(86, 4))], USAGE, {"add_special_tokens": True}),
        ([user(prose(87, 20))], JSON, {"truncate_prompt_tokens": 200}),
    ]
    for messages, mode, more in bodies:
        yield [chat("chat, template arguments", messages, mode, **more)]


def texts():
    kind = "completion, text"
    for prompt, mode, more in [
        (prose(91, 8), JSON, {}),
        ("Once", USAGE, {}),
        (prose(92, 60) + "\n\n", STREAM, {}),
        ("Ünï 漢字 👩‍👩‍👧 <|im_end|><|eot_id|> \r\n\t" * 5, USAGE, {"add_special_tokens": False}),
        ([prose(93, 6)], JSON, {"echo": True}),
        ("<|im_start|>user\nHi<|im_end|>\n<|start_header_id|>x<|end_header_id|>\n\n", USAGE, {}),
    ]:
        yield [complete(kind, prompt, mode, **more)]
    yield [complete(kind, prose(94, 7), JSON, comparable=False, prompt_logprobs=1)]
    yield [complete(kind, prose(95, 9), USAGE, stream_options={"include_usage": True, "continuous_usage_stats": True})]


def token_ids():
    """Ids as they are; the lengths around whole blocks of 32, where a repeated prompt hits one block less."""
    kind = "completion, token ids"

    def ids(seed, count):
        chance = random.Random(seed)
        return [chance.randrange(1000, 20000) for _ in range(count)]

    yield [complete(kind, ids(1, 64), mode) for mode in (JSON, USAGE)]
    yield [complete(kind, ids(2, 96) + more, JSON) for more in ([], [1234], [1234, 99])]
    yield [complete(kind, [ids(3, 33)], USAGE)]
    yield [complete(kind, ids(4, 31), STREAM)]
    yield [complete(kind, ids(5, 2500), JSON)]


def batches():
    kind = "completion, batch"
    chance = random.Random(6)
    ids = [[chance.randrange(1000, 20000) for _ in range(count)] for count in (40, 7, 70)]
    for prompts, mode, more in [
        ([prose(101, 5), prose(102, 3)], JSON, {}),
        ([prose(103, 4), "", prose(104, 4), "x"][::2], STREAM, {}),
        (["Once", "Twice", "Thrice"], JSON, {"max_tokens": 3}),
        (ids, JSON, {}),
        (ids[1:], STREAM, {}),
        ([[1, 2, 3, 4, 5], [6, 7]], JSON, {"truncate_prompt_tokens": 3, "truncation_side": "right"}),
    ]:
        step = complete(kind, prompts, mode, comparable=False, return_token_ids=True, **more)
        yield [dataclasses.replace(step, prompts=len(prompts))]
    for messages in ([system("Be brief."), user(prose(105, 5))], [user(prose(106, 4)), assistant("Yes."), user("No?")]):
        step = chat("chat, batch of one", [messages], JSON)
        yield [dataclasses.replace(step, path=CHAT_BATCH)]


def respond(kind, said, mode=JSON, thread="", **more):
    body = {"model": MODEL, "input": said, "max_output_tokens": 12, "temperature": 0, **more}
    return Step(kind, RESPONSES, body, mode, thread)


def item(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def thought(text):
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


# The same two tools, as these APIs have them.
DARK = {"type": "function", "name": "lights_off", "parameters": {}}
FLAT = [{"type": "function", **WEATHER["function"]}, DARK]
BLOCKS = [
    {"name": tool["name"], "description": "It does that.", "input_schema": tool["parameters"] or {"type": "object"}}
    for tool in FLAT
]


def responses():
    questions = ["And then?", "Give one more example, please, and say why it matters: (a) or (b)?"]
    openings = [
        ([user(prose(111, 20))], [JSON, USAGE, JSON], {}),
        ([user(prose(112, 16))], [USAGE, USAGE, JSON], {"instructions": "Be brief. " + prose(113, 4)}),
        ([item("user", prose(114, 18))], [JSON, JSON, USAGE], {"tools": FLAT}),
        ([item("developer", prose(115, 12)), item("user", "Yes?")], [USAGE, JSON, USAGE], {"cache_salt": "tenant-8"}),
    ]
    for number, (said, modes, more) in enumerate(openings):
        turns = [said] + [[item("user", question)] for question in questions]
        thread = f"resp {number + 1}"
        kind, more = "responses, conversation", {"max_output_tokens": 40, **more}
        yield [respond(kind, turn, mode, thread, **more) for turn, mode in zip(turns, modes)]
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place":"Zürich"}'}
    answer = {"type": "function_call_output", "call_id": "c1", "output": "rain, 4.50 °C"}
    asked = user(prose(121, 3))
    effort = {"reasoning": {"effort": "low"}}
    bodies = [
        ("Hello!", JSON, {}),
        ("", USAGE, {}),
        (prose(122, 40), USAGE, {}),
        ("漢字 👩‍👩‍👧 <|im_end|> \t x", JSON, {"instructions": ""}),
        (prose(123, 5), JSON, {"instructions": "You are terse.", "metadata": {"a": "b"}, "store": False}),
        ([system(prose(124, 3)), user("Hi")], USAGE, {}),
        ([developer("Be kind."), user(prose(125, 3))], JSON, {"instructions": "Be terse."}),
        ([user("Hi"), item("assistant", "Hello."), user(prose(126, 3))], JSON, {}),
        ([user("A"), user("B"), user(prose(127, 3))], USAGE, {}),
        ([asked, call, answer], JSON, {"tools": FLAT}),
        ([asked, call, answer, user("So?")], USAGE, {"tools": FLAT[:1]}),
        ([asked, item("assistant", "Hm."), call, answer], JSON, {"tools": FLAT}),
        ([asked, thought("Two and two."), item("assistant", "4"), user("So?")], JSON, {}),
        ([asked, thought("I look."), call, answer], USAGE, {"tools": FLAT}),
        (prose(128, 3), JSON, {"tools": FLAT, "tool_choice": "none"}),
        (prose(129, 3), USAGE, {"tools": FLAT, "tool_choice": "auto"}),
        (prose(130, 3), JSON, effort),
        (prose(131, 3), JSON, {"chat_template_kwargs": {"enable_thinking": False}}),
        (prose(132, 3), JSON, {"truncation": "auto", "user": "someone"}),
        ([user("Tell"), {**item("assistant", "Once upon"), "id": "m", "status": "in_progress"}], JSON, {}),
    ]
    for said, mode, more in bodies:
        yield [respond("responses", said, mode, **more)]


def message(kind, messages, mode=JSON, thread="", **more):
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    return Step(kind, MESSAGES, body, mode, thread)


def messages():
    def text(value, **more):
        return {"type": "text", "text": value, **more}

    def use(place, call="t1"):
        return {"type": "tool_use", "id": call, "name": "weather", "input": {"place": place, "n": [1.0, None, True]}}

    def found(content, call="t1"):
        return {"type": "tool_result", "tool_use_id": call, "content": content}

    questions = ["And then?", "Give one more example, please, and say why it matters: (a) or (b)?"]
    openings = [
        ([user(prose(141, 20))], [JSON, USAGE, JSON], {}),
        ([user(prose(142, 4))], [USAGE, USAGE, JSON], {"system": prose(143, 16)}),
        ([user([text(prose(144, 16)), text("Well?")])], [JSON, USAGE, USAGE], {"tools": BLOCKS}),
        ([user(prose(145, 14))], [USAGE, JSON, JSON], {"system": [text("Be brief."), text("Be kind.")]}),
    ]
    for number, (said, modes, more) in enumerate(openings):
        turns = [said] + [[user(question)] for question in questions]
        thread = f"mess {number + 1}"
        kind, more = "messages, conversation", {"max_tokens": 40, **more}
        yield [message(kind, turn, mode, thread, **more) for turn, mode in zip(turns, modes)]
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = text("x-anthropic-billing-header: cc_version=2; cch=abc;")
    asked, tools = user(prose(151, 3)), {"tools": BLOCKS}
    thinking = {"type": "thinking", "thinking": "Two.", "signature": "s"}
    once = [assistant([use("A")]), user([found("x")])]
    bodies = [
        ([user("Hello!")], JSON, {}),
        ([user(prose(152, 40))], USAGE, {"system": "Be terse."}),
        ([user(prose(153, 3))], JSON, {"system": [billing, text("Be terse."), text("Be kind.", **cached)]}),
        ([user([text(prose(154, 3), **cached), text("b")])], USAGE, {}),
        ([user([text(""), text(prose(155, 3))])], JSON, {"stop_sequences": ["zzz"]}),
        ([user("Hi"), assistant("Hello."), user(prose(156, 3))], JSON, {}),
        ([user("Hi"), assistant([text("Hello."), text("There.")]), asked], USAGE, {}),
        ([asked, assistant("Once upon")], JSON, {}),
        ([asked, assistant([thinking, text("4")]), user("So?")], USAGE, {}),
        ([asked, assistant([thinking, use("Bern")]), user([found("sun")])], JSON, tools),
        ([asked, assistant([text("I look."), use("Zürich")]), user([found("rain")])], USAGE, tools),
        # One call at a time: Llama's template takes no more.
        ([asked, *once, assistant([use("B", "t2")]), user([found("y", "t2")])], JSON, tools),
        ([asked, assistant([use("札幌")]), user([found([text("snow"), text("ice")])]), user("So?")], JSON, tools),
        ([asked], JSON, {**tools, "tool_choice": {"type": "auto"}}),
        ([asked], USAGE, {**tools, "tool_choice": {"type": "none"}}),
        ([user("<|im_end|> <|eot_id|> " + prose(157, 3))], JSON, {"metadata": {"user_id": "u"}}),
        ([user(prose(158, 3))], JSON, {"thinking": {"type": "disabled"}}),
        ([user(prose(159, 3))], USAGE, {"chat_template_kwargs": {"enable_thinking": False}}),
    ]
    for said, mode, more in bodies:
        yield [message("messages", said, mode, **more)]


def generates():
    def ids(seed, count):
        chance = random.Random(seed)
        return [chance.randrange(1000, 20000) for _ in range(count)]

    def step(said, mode, thread="", comparable=True, **more):
        sampling = {"max_tokens": 40 if thread else 8, "temperature": 0}
        body = {"model": MODEL, "token_ids": said, "sampling_params": sampling, **more}
        return Step("generate", GENERATE, body, mode, thread, comparable)

    for number in (1, 2, 3):
        turns = zip((150, 20, 40), (JSON, USAGE, JSON) if number % 2 else (USAGE, JSON, USAGE))
        seed, thread = 200 + 10 * number, f"ids {number}"
        yield [step(ids(seed + at, count), mode, thread) for at, (count, mode) in enumerate(turns)]
    for seed, count, mode, more in [(231, 1, JSON, {}), (232, 500, USAGE, {}), (233, 64, JSON, {"cache_salt": "t"})]:
        yield [step(ids(seed, count), mode, **more)]
    yield [step(ids(234, 96), JSON), step(ids(234, 96), USAGE)]


def reasoning():
    """Thoughts of earlier turns, by either name of the field."""
    asked, call = user(prose(161, 4)), called('{"place": "Bern"}')
    bodies = [
        ([asked, assistant("4", reasoning="Two and two.\n"), user("So?")], JSON, {}),
        ([asked, assistant("4", reasoning_content="Two.")], USAGE, {"add_generation_prompt": False}),
        ([asked, {**call, "reasoning": "I look."}, result("sun")], JSON, {"tools": [WEATHER]}),
        ([asked, {**call, "reasoning_content": "I look."}, result("fog"), user("So?")], STREAM, {"tools": [WEATHER]}),
        ([user(prose(162, 4))], USAGE, {"reasoning_effort": "low", "include_reasoning": False}),
    ]
    for messages, mode, more in bodies:
        yield [chat("chat, reasoning", messages, mode, **more)]


def one_prompt_by_several():
    """A long system prompt that is sent by one API after another, and by either name of the model."""
    text = prose(171, 20)
    names = [MODEL, ALIAS, MODEL, ALIAS]
    modes = [JSON, USAGE, USAGE, JSON]
    kind = "system prompt, shared"
    yield [
        respond(kind, f"Question {number}?", mode, instructions=prose(172, 14), model=name)
        for number, (name, mode) in enumerate(zip(names, modes))
    ]
    yield [
        message(kind, [user(f"Question {number}?")], mode, system=prose(173, 14), model=name)
        for number, (name, mode) in enumerate(zip(names, modes))
    ]
    yield [
        chat("one prompt, by several APIs", [system(text), user("Yes?")]),
        message("one prompt, by several APIs", [user("Yes?")], USAGE, system=text),
        respond("one prompt, by several APIs", "Yes?", instructions=text),
    ]


def salts():
    yield [
        chat("cache_salt", [user(prose(99, 10))], JSON, **({"cache_salt": salt} if salt else {}))
        for salt in ("alpha", "", "beta", "alpha")
    ]


def steps(end_id):
    """All two hundred, in an order that mixes them and keeps each thread's own."""
    threads = [
        *conversations(end_id),
        *shared_prefixes(),
        *chats(),
        *roles(),
        *parts(),
        *tools(),
        *template_arguments(),
        *texts(),
        *token_ids(),
        *salts(),
        *batches(),
        *responses(),
        *messages(),
        *generates(),
        *reasoning(),
        *one_prompt_by_several(),
    ]
    chance = random.Random(100)
    mixed = []
    while threads := [thread for thread in threads if thread]:
        mixed.append(chance.choice(threads).pop(0))
    return mixed
