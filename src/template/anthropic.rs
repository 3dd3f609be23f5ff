//! What vLLM finds out about a template by trying it, for bodies of `/v1/messages`.
//!
//! Where system messages may stand and which effort disables thinking is not in a body but in the template, so the
//! engine renders short chats and looks at what becomes of them. A chat that asks for neither is not touched.

use super::{ChatTemplate, Rendering, values};
use crate::request::{Chat, Origin};
use crate::rules::Rules;
use minijinja::value::Value;
use serde_json::{Map, Value as Json, json};
use std::sync::Arc;

/// Efforts that the engine knows besides `none`.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Puts a chat into the form that the template takes.
pub(super) fn adapt(template: &ChatTemplate, chat: &mut Chat, now: u64) {
    let Origin::Messages { thinking_is_disabled } = chat.origin else { return };
    let is_system = |message: &Map<String, Json>| message.get("role") == Some(&json!("system"));
    if chat.messages.iter().skip(1).any(is_system) && !takes_inline_system(template) {
        let (system, mut others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut chat.messages).into_iter().partition(is_system);
        let texts = system.iter().filter_map(|message| message.get("content")?.as_str());
        let mut first = Map::new();
        first.insert("role".to_owned(), Json::from("system"));
        first.insert("content".to_owned(), Json::from(texts.collect::<String>()));
        others.insert(0, first);
        chat.messages = others;
    }
    if thinking_is_disabled {
        chat.reasoning_effort = Some(disabled_thinking(template, &chat.rules, now).to_owned());
    }
}

/// Whether a system message may stand between others, in the engine's trial: without its functions and its tokens.
fn takes_inline_system(template: &ChatTemplate) -> bool {
    let message = |role: &str| json!({ "role": role, "content": "t" });
    let messages = ["system", "user", "system", "user"].map(message);
    let Ok(messages) = values::value(messages.to_vec().into()) else { return false };
    let context = [
        ("messages", messages),
        ("add_generation_prompt", Value::from(false)),
        ("raise_exception", Value::UNDEFINED),
        ("strftime_now", Value::UNDEFINED),
    ];
    template.run(Value::from_pairs(context)).is_ok()
}

/// `none`, unless the template refuses it or treats it as another effort.
fn disabled_thinking(template: &ChatTemplate, rules: &Arc<Rules>, now: u64) -> &'static str {
    let trial = |effort: &str| {
        let mut message = Map::new();
        message.insert("role".to_owned(), Json::from("user"));
        message.insert("content".to_owned(), Json::from("Hi"));
        let chat = Chat {
            messages: vec![message],
            reasoning_effort: Some(effort.to_owned()),
            add_generation_prompt: true,
            rules: Arc::clone(rules),
            ..Chat::default()
        };
        template.finish(Rendering::Chat(Box::new(chat)), now)
    };
    let Ok(none) = trial("none") else { return "low" };
    let is_another = EFFORTS.iter().any(|effort| trial(effort).as_ref() == Ok(&none));
    if is_another { "low" } else { "none" }
}

#[cfg(test)]
mod tests {
    use super::super::ChatTemplate;
    use crate::request::{Api, Input, parse};
    use std::collections::BTreeMap;

    #[track_caller]
    fn check(template: &str, fields: &str, messages: &str, expected: &str) {
        let template = ChatTemplate::compile(template, &BTreeMap::new()).expect(template);
        let body = format!(r#"{{"messages": [{messages}]{fields}}}"#);
        let prompt = parse(Api::Messages, body.as_bytes()).expect(&body);
        let Input::Chat(chat) = prompt.input else { panic!("not a chat") };
        assert_eq!(template.render(&chat, 0).as_deref(), Ok(expected), "{body}");
    }

    const USER: &str = r#"{"role": "user", "content": "a"}"#;
    const SYSTEM: &str = r#"{"role": "system", "content": "b"}"#;

    #[test]
    fn system_messages_stand_where_the_template_takes_them() {
        let any = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}";
        let first = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
            {{ raise_exception('first') }}{% endif %}{{ m.role }}:{{ m.content }} {% endfor %}";
        let messages = format!("{USER}, {SYSTEM}, {USER}");
        let system = r#", "system": "s""#;
        check(any, system, &messages, "system:s user:a system:b user:a ");
        check(first, system, &messages, "system:sb user:a user:a ");
        check(first, "", &messages, "system:b user:a user:a ");
        check(first, "", &format!("{SYSTEM}, {USER}"), "system:b user:a ");
    }

    #[test]
    fn thinking_is_disabled_by_the_lowest_effort_that_makes_a_difference() {
        let disabled = r#", "thinking": {"type": "disabled"}, "output_config": {"effort": "max"}"#;
        let prints = "{{ reasoning_effort }}";
        check(prints, disabled, USER, "none");
        let raises = "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}";
        check(raises, disabled, USER, "low");
        let ignores = "{% if reasoning_effort in ['low', 'high'] %}{{ reasoning_effort }}{% else %}max{% endif %}";
        check(ignores, disabled, USER, "low");
        check(prints, r#", "output_config": {"effort": "max"}"#, USER, "max");
    }
}
