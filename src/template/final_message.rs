//! `continue_final_message`: the prompt ends where the last message does, so that the model goes on with it.
//!
//! No template can do that by itself: a tag is appended to the message, and the rendered text is cut where the tag
//! comes out.

use super::TemplateError;
use serde_json::{Map, Value};

/// The very words transformers appends; a template's `trim` takes the trailing space, which tells the two cases apart.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Appends the tag to the last text of the last message, and returns that text.
pub(super) fn mark(
    variables: &mut Map<String, Value>,
    template: &str,
) -> Result<String, TemplateError> {
    if !template.contains("content") {
        return Err(TemplateError::FinalMessage);
    }
    let content = variables
        .get_mut("messages")
        .and_then(Value::as_array_mut)
        .and_then(|messages| messages.last_mut())
        .and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts
            .iter_mut()
            .rev()
            .find_map(|part| part.get_mut("text"))
            .ok_or(TemplateError::FinalMessage)?,
        Some(text) => text,
        None => return Err(TemplateError::FinalMessage),
    };
    let Value::String(text) = text else { return Err(TemplateError::FinalMessage) };
    let last = text.clone();
    text.push_str(TAG);
    Ok(last)
}

/// Cuts the rendered text where the tag stands.
pub(super) fn cut_after(mut text: String, last: &str) -> Result<String, TemplateError> {
    let at = text.rfind(TAG.trim_end()).ok_or(TemplateError::FinalMessage)?;
    if !text.contains(last.trim()) {
        return Err(TemplateError::FinalMessage);
    }
    let keeps_spaces = text.get(at..).is_some_and(|rest| rest.starts_with(TAG));
    text.truncate(at);
    // A template that trims content trims the tag's own trailing space, and so would have trimmed the message.
    if !keeps_spaces {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use crate::template::{ChatTemplate, TemplateError};
    use std::collections::BTreeMap;

    #[track_caller]
    fn check(source: &str, content: &str, expected: Result<&str, TemplateError>) {
        let template = ChatTemplate::compile(source, &BTreeMap::new()).expect(source);
        let variables = format!(
            r#"{{"messages": [{{"role": "assistant", "content": {content}}}], "continue_final_message": true}}"#
        );
        let rendered =
            template.render_variables(serde_json::from_str(&variables).expect("JSON"), 0);
        assert_eq!(rendered.as_deref(), expected.as_ref().map(|text| *text), "{source}");
    }

    #[test]
    fn prompt_ends_with_the_final_message() {
        check("<{{ messages[0].content }}>", r#""Hi, I ""#, Ok("<Hi, I "));
        check("<{{ messages[0].content | trim }}>", r#"" Hi, I ""#, Ok("<Hi, I"));
        check(
            "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}",
            r#"[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]"#,
            Ok("<a><b"),
        );
    }

    #[test]
    fn message_that_is_not_rendered_cannot_be_continued() {
        check("{# content #}", r#""a""#, Err(TemplateError::FinalMessage));
        check("{{ messages[0].role }}", r#""a""#, Err(TemplateError::FinalMessage));
        check("{{ messages[0].content }}", "[]", Err(TemplateError::FinalMessage));
        check("{{ messages[0].content }}", "null", Err(TemplateError::FinalMessage));
    }
}
