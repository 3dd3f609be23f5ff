use crate::template::ChatTemplate;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

fn compiled(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, text)| (name.to_owned(), text.to_owned()));
    ChatTemplate::compile(source, &BTreeMap::from(tokens)).expect(source)
}

const NOW: u64 = 1_768_480_205;

/// What is rendered here, which must be what the library renders.
#[track_caller]
fn rendered(template: &ChatTemplate, variables: &Map<String, Json>) -> Option<String> {
    let here = template.direct.render(&template.special_tokens, variables, NOW);
    if let Some(text) = &here {
        let context = template.context(variables.clone(), NOW).expect("values");
        let there = template.run(context);
        assert_eq!(there.as_ref(), Ok(text), "{} {variables:?}", template.source);
    }
    here
}

fn variables() -> Map<String, Json> {
    let all = json!({
        "t": "a text, of some length", "e": "", "s": "  a\n", "o": {"a": "b", "n": null, "l": ["x"]}, "p": {},
        "l": ["a", "b", "a text, of some length"], "k": [], "m": [{"a": 1}, {"a": "é"}], "i": 7, "z": 0, "g": -3,
        "f": 1.5, "big": 18_446_744_073_709_551_615_u64, "y": true, "w": false, "n": null, "u": "ünï</a>cödé",
        "get": {"get": 1, "items": 2}
    });
    all.as_object().expect("an object").clone()
}

const NAMES: [&str; 23] = [
    "t", "e", "s", "o", "p", "l", "k", "m", "i", "z", "g", "f", "big", "y", "w", "n", "u", "get",
    "no", "'a'", "1", "['a', 7]", "ns",
];

const BEFORE: &str = "{% set ns = namespace(a=1, t=t) %}";

/// Which of them stand on the right.
const OTHERS: [&str; 6] = ["t", "o", "i", "no", "'a'", "['a', 7]"];

/// Every expression between any two values: by turns as an output, a condition and a variable.
#[track_caller]
fn check_all(expressions: &[&str], least: usize) {
    let (variables, mut here, mut count) = (variables(), 0, 0);
    for expression in expressions {
        for a in NAMES {
            for b in OTHERS.iter().filter(|b| expression.contains('B') || **b == "t") {
                let expression = expression.replace('A', a).replace('B', b);
                let source = match count % 3 {
                    0 => format!("{BEFORE}{{{{ ({expression}) }}}}"),
                    1 => format!("{BEFORE}{{% if ({expression}) %}}yes{{% else %}}no{{% endif %}}"),
                    _ => format!(
                        "{BEFORE}{{% set x = ({expression}) %}}{{{{ x is string }}}}{{{{ x }}}}"
                    ),
                };
                count += 1;
                here += usize::from(rendered(&compiled(&source), &variables).is_some());
            }
        }
    }
    assert!(here >= least, "{here} of {count} were rendered here");
}

#[test]
fn operators_are_the_librarys() {
    let all = [
        "A == B",
        "A != B",
        "A < B",
        "A <= B",
        "A > B",
        "A >= B",
        "A in B",
        "A not in B",
        "A + B",
        "A - B",
        "A % B",
        "A ~ B",
        "A and B",
        "A or B",
        "A[B]",
        "'x' if A else B",
        "not A",
        "-A",
        "A if B",
        "A.a",
        "A['a']",
        "A[0]",
        "A[-1]",
        "A[1:]",
        "A[:-1]",
        "A[::-1]",
        "A[1:2]",
        "A[5:2]",
        "A[-9:9]",
        "A[::2]",
        "A[0].a",
        "A.a == 'b'",
        "A.a != 'b' or A.n == B",
        "A.a == B",
        "A == A.a and A is string",
        "not (A.a is string) or A == 'a text, of some length'",
        "A.a is string and not A.n",
        "A.l is string or A.a",
        "(A | length - 1) - i",
        "A - ns.a - z",
        "A - (ns.a - B)",
        "ns.a - A > z - B",
        "A | length < B | length",
        "ns.no - A > 1",
        "A.a and not A.no",
    ];
    check_all(&all, 700);
}

#[test]
fn filters_and_tests_are_the_librarys() {
    let all = [
        "A | length",
        "A | trim",
        "A | tojson",
        "A | tojson(indent=4)",
        "A | tojson(ensure_ascii=False)",
        "A | string",
        "A | default(B)",
        "A | default(B, true)",
        "A | items",
        "A | first",
        "A | last",
        "A | list",
        "A | join",
        "A | join(B)",
        "A | replace('a', 'b')",
        "A | upper",
        "A | lower",
        "A is defined",
        "A is undefined",
        "A is none",
        "A is string",
        "A is mapping",
        "A is iterable",
        "A is sequence",
        "A is number",
        "A is boolean",
        "A is true",
        "A is false",
        "A is eq B",
        "A is ne B",
        "A is in B",
        "A is not none",
        "range is defined",
        "A[1:] | length",
        "A[::-1] | first",
        "A[::-1] is iterable",
        "A[1:] is mapping",
    ];
    check_all(&all, 300);
}

#[test]
fn methods_are_the_librarys() {
    let all = [
        "A.strip()",
        "A.lstrip()",
        "A.rstrip(B)",
        "A.strip(B)",
        "A.lstrip('a\\n')",
        "A.startswith(B)",
        "A.endswith(B)",
        "A.split(B)[0]",
        "A.split('</a>')[-1]",
        "A.split(', ') | length",
        "A.upper()",
        "A.lower()",
        "A.replace('a', '')",
        "A.replace(B, 'a')",
        "A.get('a')",
        "A.get(B, 'z')",
        "A.get('get')",
        "A.items() | length",
        "A.split('a')[-1].strip('e')",
    ];
    check_all(&all, 50);
}

#[track_caller]
fn check(source: &str, expected: Option<&str>) {
    assert_eq!(rendered(&compiled(source), &variables()).as_deref(), expected, "{source}");
}

#[test]
fn statements_are_the_librarys() {
    check(
        "{{ bos_token }}{{ t }}{{ no }}{{ n }}{{ y }}{{ i }}",
        Some("<s>a text, of some lengthNoneTrue7"),
    );
    let fields = "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}\
        {{ loop.previtem }}{{ loop.nextitem }}|{% endfor %}";
    let expected = "10TrueFalse3b|21FalseFalse3aa text, of some length|32FalseTrue3b|";
    check(fields, Some(expected));
    check(
        "{% for x in l %}{% if loop.index0 > i - 7 %}{{ (l | length - 1) - loop.index0 }}{% endif %}{% if loop.index < loop.length - ns.a %}<{% endif %}{% endfor %}",
        None,
    );
    check(
        "{% set ns = namespace(a=1) %}{% for x in l %}{% if loop.index0 > i - 7 %}{{ (l | length - 1) - loop.index0 }}{% endif %}{% if loop.index < loop.length - ns.a %}<{% endif %}{% endfor %}",
        Some("<10"),
    );
    check("{% for x in k %}a{% else %}b{% endfor %}{% for x in no %}a{% endfor %}", Some("b"));
    check(
        "{% for k, v in o | items %}{{ k }}={{ v is string }} {% endfor %}",
        Some("a=True n=False l=False "),
    );
    check(
        "{% for k, v in o.items() %}{{ k }}{% endfor %}{% for k in o %}{{ k }}{% endfor %}",
        Some("anlanl"),
    );
    check(
        "{% for x in l %}{% if loop.index == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
        Some("a"),
    );
    check(
        "{% for x in l %}{% if x == 'a' %}{% continue %}{% endif %}{{ x }}{% endfor %}",
        Some("ba text, of some length"),
    );
    check("{% for x in l %}{% break %}{% else %}b{% endfor %}", None);
    check("{% for x in t %}{{ x }}{% endfor %}", None);
    check("{% for x in n %}{{ x }}{% endfor %}", None);
    check("{% for x in l if x == 'a' %}{{ x }}{% endfor %}", None);
}

/// As many as a template of a quarter of a megabyte has.
#[test]
fn tens_of_thousands_of_names_are_each_their_own() {
    let named: String = (0..20_000).map(|n| format!("{{{{ v{n} }}}}")).collect();
    let source = format!(
        "{{% set v0 = 'a' %}}{{% set v19999 = 'b' %}}{{{{ v0 }}}}{{{{ v19999 }}}}{{% if v0 == v19999 %}}{named}{{% endif %}}"
    );
    check(&source, Some("ab"));
}

#[test]
fn scopes_are_the_librarys() {
    check(
        "{% set x = 1 %}{% for y in l %}{{ x }}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}",
        Some("1212121"),
    );
    check(
        "{% for y in l %}{% if x is defined %}{{ x }}{% endif %}{% set x = y %}{% endfor %}{{ x }}",
        Some(""),
    );
    check("{% set x = 1 %}{% if y %}{% set x = 2 %}{% endif %}{{ x }}", Some("2"));
    check(
        "{% with x = 1, z = x %}{{ x }}{{ z }}{% set x = 3 %}{{ x }}{% endwith %}{{ x }}",
        Some("113"),
    );
    check("{% set x %}a{{ i }}{% endset %}{{ x }}{{ x | length }}", Some("a72"));
    check("{% generation %}{{ t }}{% endgeneration %}", Some("a text, of some length"));
    check(
        "{% set ns = namespace(a=1) %}{% for x in l %}{% set ns.a = ns.a + 1 %}{% set ns.b = x %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
        Some("4a text, of some length"),
    );
    check(
        "{% for x in l %}{% for x in m %}{{ x.a }}{{ loop.index }}{% endfor %}{{ loop.index }}{{ x }}{% endfor %}",
        Some("11é21a11é22b11é23a text, of some length"),
    );
}

#[test]
fn macros_are_the_librarys() {
    let source = "{% macro f(x, y=2) %}[{{ x }}{{ y }}{{ z }}{{ q }}]{% set q = 9 %}{% endmacro %}";
    let check = |rest: &str, expected| check(&format!("{source}{rest}"), expected);
    check("{{ f(1) }}{{ f(1, 3) }}{{ f(y=4, x=5) }}{{ f() }}", Some("[120][130][540][20]"));
    check("{% set q = 1 %}{{ f(1) }}{% set q = 2 %}{{ f(1) | trim }}", Some("[1201][1202]"));
    check(
        "{% for q in l %}{{ f(q) }}{% set z = 5 %}{{ f(z) }}{% endfor %}",
        Some("[a20][520][b20][520][a text, of some length20][520]"),
    );
    check(
        "{% if y %}{% set q = 3 %}{% endif %}{% with q = 4 %}{{ f(q) }}{% endwith %}",
        Some("[4203]"),
    );
    check("{{ f(1, 2, 3) }}", None);
    check("{{ f(1, x=2) }}", None);
    check("{{ f(w=2) }}", None);
    check("{{ g(1) }}", None);
    check(
        "{% macro g(n) %}<{{ f(n) }}{{ n }}>{% endmacro %}{% set q = 1 %}{% for x in [1, 2] %}{{ g(x) }}{% endfor %}",
        Some("<[1201]1><[2201]2>"),
    );
    check("{% macro h(n) %}{{ h(n) }}{% endmacro %}{{ h(1) }}", None);
    check(
        "{% macro h() %}{{ loop.index }}{% endmacro %}{% for x in l %}{{ h() }}{% endfor %}",
        None,
    );
    check(
        "{% macro h() %}{{ ns.a }}{% set ns.a = ns.a + 1 %}{% endmacro %}{% set ns = namespace(a=0) %}{{ h() }}{{ h() }}{{ ns.a }}",
        Some("012"),
    );
}

#[test]
fn what_fails_is_left_to_the_library() {
    for source in [
        "{{ no.a }}",
        "{{ raise_exception('x') }}",
        "{{ 1 + 'a' }}",
        "{{ f }}",
        "{{ o }}",
        "{{ l }}",
        "{{ f | tojson }}",
        "{{ t | title }}",
        "{{ loop }}",
        "{{ big }}",
        "{{ {'a': 1} }}",
        "{{ range(3) | length }}",
        "{{ 'a' * 3 }}",
        "{{ 1 < 2 < 3 }}",
        "{% set a, b = l %}",
        "{% call f() %}{% endcall %}",
        "{{ strftime_now('%Q') }}",
        "{{ big | tojson }}",
    ] {
        let template = compiled(source);
        assert_eq!(rendered(&template, &variables()), None, "{source}");
    }
    check("{{ strftime_now('%d %b %Y') }}", Some("15 Jan 2026"));
}

#[test]
fn work_and_output_are_bounded() {
    let endless = "{% for a in l %}{% for b in l %}{% for c in l %}{% for d in l %}{{ d }}{% endfor %}{% endfor %}{% endfor %}{% endfor %}";
    let template = compiled(endless);
    for (items, is_here) in [(10, true), (100, false)] {
        let variables = json!({"l": vec!["x"; items]}).as_object().expect("an object").clone();
        assert_eq!(rendered(&template, &variables).is_some(), is_here, "{items}");
    }
    let template = compiled("{% for a in l %}{{ t }}{% endfor %}");
    let variables = json!({"l": vec![1; 20], "t": "x".repeat(1 << 20)});
    let variables = variables.as_object().expect("an object");
    assert_eq!(template.direct.render(&BTreeMap::new(), variables, 0), None);
}

/// Chance from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % bound
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    fn text(&mut self) -> String {
        let parts = [
            "a",
            " ",
            "\n",
            "<think>",
            "</think>",
            "é",
            "<tool_response>",
            "</tool_response>",
            "x\ny",
            "\"",
            "<|im_end|>",
        ];
        (0..self.below(5)).map(|_| self.of(&parts)).collect()
    }

    fn content(&mut self) -> Json {
        match self.below(9) {
            0 => Json::Null,
            1 => json!([{"type": "text", "text": self.text()}]),
            2 => {
                json!([{"type": "text", "text": self.text()}, {"type": "image"}, {"type": "text", "text": self.text()}])
            }
            3 => json!([]),
            _ => Json::from(self.text()),
        }
    }

    fn message(&mut self) -> Json {
        let role =
            self.of(&["user", "assistant", "user", "assistant", "tool", "system", "developer"]);
        let mut message = json!({"role": role, "content": self.content()});
        let fields = message.as_object_mut().expect("an object");
        if self.below(6) == 0 {
            fields.insert("reasoning_content".to_owned(), Json::from(self.text()));
        }
        if role == "assistant" && self.below(3) == 0 {
            let call = |random: &mut Self| {
                let arguments = random.of(&[
                    json!({"a": "b", "n": 1.5}),
                    json!({}),
                    json!("{}"),
                    json!({"x": {"y": [null, true]}}),
                ]);
                json!({"type": "function", "id": "c1", "function": {"name": "f", "arguments": arguments}})
            };
            let calls: Vec<Json> = (0..1 + self.below(2)).map(|_| call(self)).collect();
            fields.insert("tool_calls".to_owned(), Json::from(calls));
        }
        if role == "tool" && self.below(2) == 0 {
            fields.insert("name".to_owned(), Json::from("f"));
        }
        message
    }

    fn chat(&mut self) -> Map<String, Json> {
        let messages: Vec<Json> = (0..self.below(8)).map(|_| self.message()).collect();
        let tool = json!({"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}});
        let mut chat = json!({"messages": messages, "add_generation_prompt": self.below(2) == 0, "documents": null});
        let fields = chat.as_object_mut().expect("an object");
        fields.insert(
            "tools".to_owned(),
            self.of(&[Json::Null, Json::Null, json!([tool]), json!([tool, tool])]),
        );
        for name in ["enable_thinking", "add_vision_id", "preserve_thinking"] {
            if self.below(4) == 0 {
                fields.insert(name.to_owned(), Json::from(self.below(2) == 0));
            }
        }
        fields.clone()
    }
}

/// Public templates, and for each whether chats of texts are rendered here. Qwen3's is there in any case; the others are
/// fetched, and natively alone can they be read.
fn templates() -> Vec<(String, bool)> {
    let qwen3 = include_str!("../../../tests/data/models/qwen3/chat_template.jinja");
    let mut found = vec![(qwen3.to_owned(), true)];
    let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(".work/models");
    let folders = std::fs::read_dir(models).into_iter().flatten().flatten();
    let mut folders: Vec<_> = folders.map(|folder| folder.path()).collect();
    folders.sort();
    for folder in folders {
        if let Ok(source) = std::fs::read_to_string(folder.join("chat_template.jinja")) {
            found.push((source, !folder.ends_with("mistral-nemo")));
        }
    }
    found
}

#[test]
fn chats_are_rendered_as_the_library_renders_them() {
    let mut random = Random(0x5EED);
    for (source, is_here) in templates() {
        let template = compiled(&source);
        let here = (0..100).filter(|_| rendered(&template, &random.chat()).is_some()).count();
        assert!(here > 0 || !is_here, "{source}");
    }
}

#[test]
fn common_chats_are_rendered_here() {
    let roles = ["system", "user", "assistant", "user"];
    let messages = roles.map(|role| json!({"role": role, "content": "a"}));
    let chat = json!({"messages": messages, "tools": null, "documents": null, "add_generation_prompt": true});
    for (source, is_here) in templates() {
        let here = rendered(&compiled(&source), chat.as_object().expect("an object"));
        assert_eq!(here.is_some(), is_here, "{source}");
    }
}
