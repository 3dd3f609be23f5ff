//! What transformers' `apply_chat_template` does to messages before its template sees them, from 5.2x on.
//!
//! Seen in transformers 5.24. Engines call it behind their own normalisation; vLLM 0.32 comes with 5.19, which does none
//! of this, so it is no part of rendering a client's chat.

use super::TemplateError;
use serde_json::{Map, Value};

/// The names under which reasoning comes, in the order of precedence.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Drops the fields of messages that are null, and gives reasoning the names that templates read.
pub(super) fn normalise(variables: &mut Map<String, Value>) -> Result<(), TemplateError> {
    for (name, absent) in [
        ("tools", Value::Null),
        ("documents", Value::Null),
        ("add_generation_prompt", false.into()),
    ] {
        variables.entry(name).or_insert(absent);
    }
    let is_set = |name: &str| variables.get(name) == Some(&Value::Bool(true));
    if is_set("continue_final_message") && is_set("add_generation_prompt") {
        return Err(TemplateError::Refused("continue_final_message"));
    }
    let Some(messages) = variables.get_mut("messages").and_then(Value::as_array_mut) else {
        return Ok(());
    };
    if messages.is_empty() {
        return Err(TemplateError::Refused("messages"));
    }
    for message in messages {
        let Value::Object(fields) = message else {
            return Err(TemplateError::Refused("messages"));
        };
        fields.retain(|_, value| !value.is_null());
        name_reasoning(fields);
    }
    Ok(())
}

fn name_reasoning(fields: &mut Map<String, Value>) {
    let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(*name)).cloned() else {
        return;
    };
    if !fields.contains_key("thinking") {
        fields.shift_insert(0, "thinking".to_owned(), reasoning.clone());
    }
    fields.insert("reasoning_content".to_owned(), reasoning);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts were made by transformers 5.24.0.
    #[track_caller]
    fn check(message: &str, expected: Result<&str, TemplateError>) {
        let message: Value = serde_json::from_str(message).expect("JSON");
        let mut variables = Map::new();
        variables.insert("messages".to_owned(), Value::Array(vec![message]));
        let normal = normalise(&mut variables).map(|()| variables["messages"][0].to_string());
        assert_eq!(normal.as_deref(), expected.as_deref());
    }

    #[test]
    fn null_fields_are_dropped() {
        check(r#"{"role":"user","content":null}"#, Ok(r#"{"role":"user"}"#));
        check(r#"{"a":[null],"b":{"c":null}}"#, Ok(r#"{"a":[null],"b":{"c":null}}"#));
    }

    #[test]
    fn reasoning_has_the_names_that_templates_read() {
        check(
            r#"{"reasoning":"r"}"#,
            Ok(r#"{"thinking":"r","reasoning":"r","reasoning_content":"r"}"#),
        );
        check(r#"{"reasoning_content":"r"}"#, Ok(r#"{"thinking":"r","reasoning_content":"r"}"#));
        check(
            r#"{"thinking":"t","reasoning":"r"}"#,
            Ok(r#"{"thinking":"t","reasoning":"r","reasoning_content":"t"}"#),
        );
        check(
            r#"{"thinking":"t","reasoning_content":"c"}"#,
            Ok(r#"{"thinking":"t","reasoning_content":"c"}"#),
        );
        check(
            r#"{"reasoning_content":null,"reasoning":""}"#,
            Ok(r#"{"thinking":"","reasoning":"","reasoning_content":""}"#),
        );
    }

    #[test]
    fn what_it_raises_at_is_refused() {
        check("1", Err(TemplateError::Refused("messages")));
        for (text, what) in [
            (r#"{"messages": []}"#, "messages"),
            (
                r#"{"messages": [], "continue_final_message": true, "add_generation_prompt": true}"#,
                "continue_final_message",
            ),
        ] {
            let mut variables = serde_json::from_str(text).expect("JSON");
            assert_eq!(normalise(&mut variables), Err(TemplateError::Refused(what)), "{text}");
        }
    }
}
