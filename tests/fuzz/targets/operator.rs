//! What an operator gives us: the plugin's configuration and a model's chat template.

use super::{Target, halves, no_more_seeds};
use crate::memory::{bounded, measure};
use std::collections::BTreeMap;
use warmpath::config::Config;
use warmpath::request::{Api, Input, parse};
use warmpath::template::ChatTemplate;

pub const CONFIGS: Target = Target {
    name: "configs",
    run: configs,
    words: &[
        "\"models\"",
        "\"name\"",
        "\"aliases\"",
        "\"prepared\"",
        "\"cluster\"",
        "\"path\"",
        "\"clusters\"",
        "\"admin_cluster\"",
        "\"replicas\"",
        "\"poll_cluster\"",
        "\"poll_interval_ms\"",
        "\"stale_after_ms\"",
        "\"max_body_bytes\"",
        "\"default_block_size\"",
        "\"default_capacity_blocks\"",
        "\"engine_utc_offset_minutes\"",
        "\"tie_ms\"",
        "\"cost\"",
        "\"pressure_ms\"",
        "\"recent_half_life_ms\"",
        "\"explain\"",
        "\"request_header\"",
        "\"secret\"",
        "\"10.0.0.1:80\"",
    ],
    more_seeds: no_more_seeds,
    cases: 1500,
};

/// Accepted or refused in words that stay short and never repeat the secret.
fn configs(data: &[u8]) {
    match bounded(data.len(), 64 << 10, 300, || Config::parse(data)) {
        Ok(config) => {
            assert!(!config.models.is_empty() && !config.clusters.is_empty());
            for model in &config.models {
                assert!(config.model_named(model.names.first().map(String::as_str)).is_some());
            }
            assert_eq!(
                Config::parse(data).map(|again| again.fingerprint()),
                Ok(config.fingerprint())
            );
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() < 1000, "{} bytes of refusal", text.len());
            let json: serde_json::Value = serde_json::from_slice(data).unwrap_or_default();
            let secret =
                json["explain"]["secret"].as_str().or(json["explain"].as_str()).unwrap_or_default();
            let is_known_from_there_alone =
                String::from_utf8_lossy(data).matches(secret).count() == 1;
            assert!(
                secret.len() < 6 || !is_known_from_there_alone || !text.contains(secret),
                "{text}"
            );
        }
    }
}

pub const TEMPLATES: Target = Target {
    name: "templates",
    run: templates,
    words: &[
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{# ",
        " #}",
        "{%- ",
        " -%}",
        "for m in messages",
        "endfor",
        "if ",
        "elif ",
        "else",
        "endif",
        "set x = ",
        "set ns = namespace(x=1)",
        "set ns.x = ",
        "endset",
        "macro f(a, b=1)",
        "endmacro",
        "f(1)",
        "call f()",
        "endcall",
        "filter upper",
        "endfilter",
        "generation",
        "endgeneration",
        "break",
        "continue",
        "recursive",
        "loop(",
        "loop.index",
        "loop.previtem",
        "loop.cycle(1,2)",
        "is defined",
        "is mapping",
        "is iterable",
        "in ",
        "not ",
        " and ",
        " or ",
        " ~ ",
        " * 1000000",
        " ** 9",
        " // 0",
        " % 0",
        "[::-1]",
        "[1:]",
        "|tojson",
        "|tojson(indent=2)",
        "|string",
        "|list",
        "|length",
        "|join(',')",
        "|sort",
        "|reverse",
        "|map(attribute='a')",
        "|selectattr('a')",
        "|groupby('a')",
        "|batch(3)",
        "|slice(3)",
        "|indent(4)",
        "|replace('a','aaaa')",
        "|items",
        "|dictsort",
        "|unique",
        "|default('x')",
        "|trim",
        "|format(1)",
        "|round(3)",
        "|int",
        "|float",
        "|abs",
        "|first",
        "|last",
        "|min",
        "|max",
        "|sum",
        "|safe",
        ".split(',')",
        ".rsplit(none, 1)",
        ".strip()",
        ".items()",
        ".get('a')",
        ".format(1)",
        ".join(['a'])",
        ".count('a')",
        ".replace('', 'ab')",
        ".startswith('a')",
        ".title()",
        ".find('a')",
        ".splitlines()",
        "range(10)",
        "range(99999999)",
        "dict(a=1)",
        "cycler(1,2)",
        "joiner()",
        "lipsum()",
        "strftime_now('%d %b %Y')",
        "raise_exception('no')",
        "namespace()",
        "'%5000d'|format(1)",
        "'x' * 9999",
        "{{ x }}",
        "raw",
        "endraw",
        "block a",
        "endblock",
        "include 'chat'",
        "extends 'chat'",
        "import 'chat' as c",
        "do x",
        "with a=1",
        "endwith",
        "autoescape true",
        "endautoescape",
        "debug()",
    ],
    more_seeds: no_more_seeds,
    cases: 600,
};

/// A rendering's text, error or limit, within bounds that hold for every template: the source stands before the NUL, the
/// body behind it.
fn templates(data: &[u8]) {
    let (source, body) = halves(data);
    let source = String::from_utf8_lossy(source);
    // See `values_of_templates_may_nest`: what a loop can nest has no bound, and chance finds that.
    if source.contains("namespace") && source.contains("range") {
        return;
    }
    // The library counts columns in 16 bits, and where overflow is checked it panics; in what is shipped it is not.
    if source.lines().any(|line| line.len() > 60_000) {
        return;
    }
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Ok(template) =
        bounded(source.len(), 1 << 20, 4000, || ChatTemplate::compile(&source, &tokens))
    else {
        return;
    };
    let rendered = |call: &dyn Fn() -> Result<String, warmpath::template::TemplateError>| {
        let (result, taken) = measure(call);
        assert!(taken.peak <= 256 << 20, "{} bytes held", taken.peak);
        assert!(taken.total <= 4 << 30, "{} bytes asked for", taken.total);
        if let Ok(text) = &result {
            assert!(text.len() <= 16 << 20);
        }
        result
    };
    if let Ok(serde_json::Value::Object(variables)) = serde_json::from_slice(body) {
        let _ = rendered(&|| template.render_variables(variables.clone(), 1_768_480_200));
    }
    if let Ok(prompt) = parse(Api::Chat, body)
        && let Input::Chat(chat) = &prompt.input
    {
        let once = rendered(&|| template.render(chat, 1_768_480_200));
        assert_eq!(rendered(&|| template.render(chat, 1_768_480_200)), once, "a second time");
    }
}
