//! Inputs that nest: a few deep, as deep as a limit, and far beyond it. What recurses over them ends a VM, whose stack
//! is one megabyte, where the same code natively still has room: so these run as wasm too.

use super::targets::{self, Target};

const DEPTHS: [usize; 8] = [10, 60, 120, 126, 128, 151, 1000, 9000];

/// Around a hole, which is where the next one or the core goes.
const JSON: &[(&str, &str)] =
    &[("[", "]"), ("{\"a\":", "}"), ("[{\"type\":\"text\",\"text\":", "}]"), ("[[],", "]")];

/// Where deep JSON may stand in a body or an answer.
const PLACES: &[&str] = &[
    "HOLE",
    r#"{"messages":HOLE}"#,
    r#"{"messages":[{"role":"user","content":HOLE}]}"#,
    r#"{"messages":[{"role":"user","content":"a","more":HOLE}],"tools":[{"type":"function","function":{"name":"f","parameters":{"a":HOLE}}}]}"#,
    r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":HOLE}}}]}],"chat_template_kwargs":{"x":HOLE}}"#,
    r#"{"messages":[{"role":"user","content":"a"}],"unknown":HOLE,"documents":[{"a":HOLE}]}"#,
    r#"{"prompt":HOLE}"#,
    r#"{"data":HOLE,"choices":HOLE,"usage":HOLE,"cluster_statuses":HOLE}"#,
    r#"{"cluster_statuses":[{"name":"pool","host_statuses":[{"address":HOLE}]}]}"#,
    r#"{"models":HOLE}"#,
    r#"{"models":[{"name":"m","prepared":{"cluster":"c","path":HOLE}}]}"#,
];

#[rustfmt::skip]
const JINJA: &[(&str, &str, &str)] = &[
    ("{{ ", "(", ")"), ("{{ ", "[", "]"), ("{{ ", "[1,", "]"), ("{{ ", "{'a':", "}"), ("{{ ", "-", ""), ("{{ ", "not ", ""), ("{{ x", "", ".a"),
    ("{{ x", "", "[0]"), ("{{ x", "", "|list"), ("{{ x", "", "()"), ("{{ x", "", ".f(1)"), ("{{ 1", "", " + 1"), ("{{ 1", "", " ~ 1"),
    ("{{ 2", "", " ** 1"), ("{{ 1", "", " == 1"), ("{{ 1", "", " and 1"), ("{{ 1", "", " or 0"), ("{{ 1", "", " if x else 1"),
    ("{{ 1", "", " in []"), ("{{ x", "", "[1:]"), ("{{ x", "", " is defined"), ("{{ ", "f(", ")"), ("{{ ", "range(", ")"), ("{{ ", "x[", "]"),
    ("{{ ", "x|default(", ")"), ("{{ ", "f(a=", ")"), ("{{ ", "[x for x in ", "]"), ("{{ 'a'", "", " 'a'"), ("{{ ", "1 if ", " else 1"),
];

#[rustfmt::skip]
const BLOCKS: &[(&str, &str)] = &[
    ("{% if x %}", "{% endif %}"), ("{% for a in [1] %}", "{% endfor %}"), ("{% macro f() %}", "{% endmacro %}"),
    ("{% filter trim %}", "{% endfilter %}"), ("{% set x %}", "{% endset %}"), ("{% with a=1 %}", "{% endwith %}"),
    ("{% call f() %}", "{% endcall %}"), ("{% generation %}", "{% endgeneration %}"), ("{% if x %}{% else %}", "{% endif %}"),
    ("{% raw %}", "{% endraw %}"), ("{{", "}}"), ("{#", "#}"), ("{% autoescape true %}", "{% endautoescape %}"),
    ("{% block a %}", "{% endblock %}"), ("{% if a %}{% elif b %}", "{% endif %}"),
];

fn deep(open: &str, core: &str, close: &str, depth: usize) -> String {
    format!("{}{core}{}", open.repeat(depth), close.repeat(depth))
}

fn run(names: &[&str], input: &str) {
    for target in targets::ALL.iter().filter(|target| names.contains(&target.name)) {
        let Target { name, run, .. } = target;
        if std::env::var_os("WARMPATH_FUZZ_TRACE").is_some() {
            let shown: String = input.chars().take(100).collect();
            eprintln!("{name}: {} bytes, {shown}", input.len());
        }
        run(input.as_bytes());
    }
}

#[test]
fn json_may_nest() {
    for depth in DEPTHS {
        for (open, close) in JSON {
            let hole = deep(open, "1", close, depth);
            for place in PLACES {
                let input = place.replace("HOLE", &hole);
                run(&["bodies", "admin", "models", "configs"], &input);
                run(&["prompts"], &format!("\u{1}\u{9}\u{2}\0{input}"));
                run(&["responses"], &format!("\u{2}{input}"));
                run(&["responses"], &format!("\u{4}data: {input}\n\n"));
            }
            // As a text that holds JSON, which is read when the template is rendered.
            let text = serde_json::json!({"messages": [{"role": "assistant", "tool_calls":
                [{"function": {"name": "f", "arguments": format!("{{\"a\": {hole}}}")}}]}]});
            run(&["prompts"], &format!("\u{1}\u{9}\u{2}\0{text}"));
        }
    }
}

/// The variables of the templates below.
const BODY: &str = r#"{"x":[1],"messages":[{"role":"user","content":"a"}]}"#;

#[test]
fn templates_may_nest() {
    // Between these the library's own bound holds, for which a build without optimisation lacks the stack.
    for depth in [10, 60, 1000, 9000] {
        for (before, open, close) in JINJA {
            let expression = deep(open, if before.len() > 3 { "" } else { "1" }, close, depth);
            run(&["templates"], &format!("{before}{expression} }}}}\0{BODY}"));
            run(&["templates"], &format!("{{% set x = {}{expression} %}}\0{BODY}", &before[3..]));
        }
        for (open, close) in BLOCKS {
            run(&["templates"], &format!("{}\0{BODY}", deep(open, "a", close, depth)));
            run(&["templates"], &format!("{}\0{BODY}", deep(open, "a", "", depth)));
        }
        let elifs = format!("{{% if a %}}{}{{% endif %}}\0{BODY}", "{% elif b %}".repeat(depth));
        run(&["templates"], &elifs);
    }
    for calls in ["f()", "f() ~ f()", "caller()", "[1] | map('f')", "f() | upper"] {
        run(
            &["templates"],
            &format!("{{% macro f() %}}{{{{ {calls} }}}}{{% endmacro %}}{{{{ f() }}}}\0{BODY}"),
        );
        run(
            &["templates"],
            &format!(
                "{{% macro f() %}}{{% call f() %}}{{{{ {calls} }}}}{{% endcall %}}{{% endmacro %}}{{{{ f() }}}}\0{BODY}"
            ),
        );
    }
    run(
        &["templates"],
        &format!("{{% for a in [[1]] recursive %}}{{{{ loop([[1]]) }}}}{{% endfor %}}\0{BODY}"),
    );
    run(&["templates"], &format!("{{% include 'chat' %}}\0{BODY}"));
    run(&["templates"], &format!("{{% extends 'chat' %}}\0{BODY}"));
    run(&["templates"], &format!("{{% import 'chat' as x %}}{{{{ x }}}}\0{BODY}"));
}

/// Values that a template nests by itself, used in each way. Some two thousand levels take the whole stack, in the
/// library's own comparing and dropping, and nothing bounds them: a template that does so on purpose ends the VM.
#[test]
fn values_of_templates_may_nest() {
    for depth in [10, 100, 150] {
        for print in [
            "ns.a",
            "ns.a | tojson",
            "ns.a | string",
            "ns.a ~ ''",
            "ns.a == ns.b",
            "[ns.a, ns.b] | sort",
            "ns.a | list | string",
            "{ns.a: 1}",
            "ns.a in [ns.b]",
            "[ns.a] | unique | list",
            "ns.a | pprint",
            "ns",
        ] {
            for wrap in [
                "[ns.a]",
                "{'a': ns.a}",
                "(ns.a,)",
                "namespace(a=ns.a)",
                "dict(a=ns.a)",
                "[ns.a] + [1]",
                "[ns.a] | list",
                "[ns.a] | map('upper')",
                "ns.a | batch(1)",
                "ns.a | items",
                "ns.a[:]",
                "ns.a | reverse",
            ] {
                run(
                    &["templates"],
                    &format!(
                        "{{% set ns = namespace(a=[1], b=[1]) %}}{{% for i in range({depth}) %}}{{% set ns.b = ns.a %}}{{% set ns.a = {wrap} %}}{{% endfor %}}{{{{ {print} }}}}\0{BODY}"
                    ),
                );
            }
        }
    }
}

#[test]
fn tokenizer_files_may_nest() {
    let file = targets::tokenizer::byte_level().to_string();
    let normalizer = r#""normalizer":{"type":"NFC"}"#;
    assert!(file.contains(normalizer));
    for depth in DEPTHS {
        for (slot, open, core, close) in [
            ("normalizer", r#"{"type":"Sequence","normalizers":["#, r#"{"type":"NFC"}"#, "]}"),
            ("normalizer", r#"{"type":"Sequence","pretokenizers":["#, r#"{"type":"NFC"}"#, "]}"),
            (
                "pre_tokenizer",
                r#"{"type":"Sequence","pretokenizers":["#,
                r#"{"type":"Whitespace"}"#,
                "]}",
            ),
            ("post_processor", r#"{"type":"Sequence","processors":["#, "null", "]}"),
            ("more", "[", "1", "]"),
            ("more", r#"{"a":"#, "1", "}"),
        ] {
            let nested = format!("\"{slot}\":{}", deep(open, core, close, depth));
            run(&["tokenizers"], &format!("{}\0hello", file.replace(normalizer, &nested)));
        }
    }
}
