//! Renders chats by chat templates, as transformers' `apply_chat_template` is called, for `scripts/templates.sh`.
//!
//! It reads a line of JSON for each template, `{"template": .., "special_tokens": {..}, "now": .., "chats": [..]}`, and
//! writes one with the text or `{"error": ..}` for each chat.

#[cfg(not(target_family = "wasm"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::io::BufRead;
    for line in std::io::stdin().lock().lines() {
        println!("{}", serde_json::to_string(&rendered(serde_json::from_str(&line?)?))?);
    }
    Ok(())
}

#[cfg(target_family = "wasm")]
fn main() {}

#[cfg(not(target_family = "wasm"))]
#[derive(serde::Deserialize)]
struct Task {
    template: String,
    special_tokens: std::collections::BTreeMap<String, String>,
    now: u64,
    chats: Vec<serde_json::Map<String, serde_json::Value>>,
}

#[cfg(not(target_family = "wasm"))]
fn rendered(task: Task) -> Vec<serde_json::Value> {
    use serde_json::{Value, json};
    use warmpath::template::ChatTemplate;
    let template = ChatTemplate::compile(&task.template, &task.special_tokens);
    let render = |chat| match &template {
        Ok(template) => match template.render_variables(chat, task.now) {
            Ok(text) => Value::from(text),
            Err(error) => json!({"error": error.to_string()}),
        },
        Err(error) => json!({"error": error.to_string()}),
    };
    task.chats.into_iter().map(render).collect()
}
