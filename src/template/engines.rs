//! What each engine does to a chat before its template sees it, as a table: [`super::normalise`] goes by it.
//!
//! A difference between engines is a row here, never a question after an engine's name elsewhere. Of vLLM the rows were
//! seen (0.32, request to token ids); of SGLang they were read in the source of its package (0.5.23), and not observed.

use super::content::{ContentFormat, loops_over_content_of};
use crate::rules::Engine;

/// One engine's rules.
pub(super) struct Table {
    /// Between the texts of a message whose template takes one text.
    pub separator: &'static str,
    /// Whether empty texts are left out of these.
    pub drops_empty_texts: bool,
    /// Between the texts of a tool's answer in parts, where its template takes parts.
    pub tool_separator: &'static str,
    /// Whether a content that is a text becomes a list of one part for a template that takes parts.
    pub wraps_texts: bool,
    /// Kinds of part that are text, with the field it is in; and whether a part without it is left out.
    pub text_parts: &'static [(&'static str, &'static str, bool)],
    /// Kinds of part that are left out.
    pub dropped_parts: &'static [&'static str],
    /// Whether parts keep the fields that are in none of the engine's kinds of part.
    pub keeps_part_fields: bool,
    /// Whether a template that takes texts is told of media, by a placeholder in front of the text.
    pub writes_placeholders: bool,
    /// Whether a first line of `system` texts that is Claude Code's is dropped.
    pub drops_billing_header: bool,
    /// Fields of messages that are passed on, by role; the last row is for every other role. A null counts as absent.
    pub fields: &'static [(&'static str, &'static [&'static str])],
    /// Under which fields an assistant's reasoning comes; the first that is given counts.
    pub reasoning_from: &'static [&'static str],
    /// Under which names the template gets it.
    pub reasoning_to: &'static [&'static str],
    /// Whether an empty list of calls is as none.
    pub drops_empty_calls: bool,
    /// The fields of a call, and of its function, in order, with null for what is absent. Others follow where
    /// `keeps_call_fields`.
    pub call: &'static [&'static str],
    /// See `call`.
    pub called: &'static [&'static str],
    /// Whether calls keep fields of the client's own, and lack what the client left out.
    pub keeps_call_fields: bool,
    /// Whether arguments that are no object become an empty one; the engine refuses them otherwise.
    pub empties_bad_arguments: bool,
    /// Whether the fields of a tool's function stay in the client's order.
    pub keeps_tool_order: bool,
    /// The fields of a tool's function, in order, and those of them that are there when absent.
    pub function: &'static [&'static str],
    /// See `function`.
    pub function_nulls: &'static [&'static str],
    /// Whether a tool has a `defer_loading` that is null where it was not given.
    pub tool_has_null: bool,
    /// Whether `tool_choice` of `none` leaves out the tools, and one that names a tool all others.
    pub heeds_tool_choice: bool,
    /// Whether `developer` becomes `system` where the template does not name that role.
    pub converts_developer: bool,
    /// Whether the body's `add_generation_prompt`, `continue_final_message` and `documents` are heeded as such. Where not,
    /// a last message of the assistant's is given to the template as the user's.
    pub has_prompt_fields: bool,
    /// Whether template arguments that are null or `auto` count as absent.
    pub drops_unset_arguments: bool,
    /// Whether the body's `reasoning_effort` wins over an argument of that name.
    pub effort_wins: bool,
    /// Switches that an effort sets, unless the arguments do: off for `none`, else on.
    pub effort_switches: &'static [&'static str],
    /// How a template takes content, where it is not configured.
    pub format: fn(&str, ContentFormat) -> ContentFormat,
}

/// vLLM's.
static VLLM: Table = Table {
    separator: "\n",
    drops_empty_texts: true,
    tool_separator: "\n",
    wraps_texts: true,
    text_parts: &[
        ("text", "text", true),
        ("input_text", "text", false),
        ("output_text", "text", false),
        ("refusal", "refusal", true),
        ("thinking", "thinking", false),
    ],
    dropped_parts: &[],
    keeps_part_fields: true,
    writes_placeholders: true,
    drops_billing_header: true,
    fields: &[("tool", &["tool_call_id", "name", "task"]), ("", &["name", "task"])],
    reasoning_from: &["reasoning", "reasoning_content"],
    reasoning_to: &["reasoning", "reasoning_content"],
    drops_empty_calls: true,
    call: &["id", "function", "type"],
    called: &["arguments", "name"],
    keeps_call_fields: true,
    empties_bad_arguments: true,
    keeps_tool_order: false,
    function: &["name", "description", "parameters", "strict", "defer_loading"],
    function_nulls: &["description", "parameters"],
    tool_has_null: false,
    heeds_tool_choice: false,
    converts_developer: true,
    has_prompt_fields: true,
    drops_unset_arguments: true,
    effort_wins: true,
    effort_switches: &["enable_thinking"],
    format: |_, detected| detected,
};

/// SGLang's.
static SGLANG: Table = Table {
    separator: " ",
    drops_empty_texts: false,
    tool_separator: " ",
    wraps_texts: false,
    text_parts: &[("text", "text", false)],
    dropped_parts: &["thinking", "reasoning"],
    keeps_part_fields: false,
    writes_placeholders: false,
    drops_billing_header: false,
    fields: &[
        ("user", &[]),
        (
            "",
            &[
                "tool_call_id",
                "name",
                "phase",
                "reasoning_content",
                "tool_calls",
                "tools",
                "prefix",
            ],
        ),
    ],
    reasoning_from: &[],
    reasoning_to: &[],
    drops_empty_calls: false,
    call: &["id", "index", "type", "function"],
    called: &["name", "arguments"],
    keeps_call_fields: false,
    empties_bad_arguments: false,
    keeps_tool_order: true,
    function: &["description", "name", "parameters", "strict", "defer_loading"],
    function_nulls: &["description", "parameters"],
    tool_has_null: true,
    heeds_tool_choice: true,
    converts_developer: false,
    has_prompt_fields: false,
    drops_unset_arguments: false,
    effort_wins: false,
    effort_switches: &["thinking", "enable_thinking"],
    format: |template, _| {
        let names_media =
            ["image", "audio", "video", "vision"].iter().any(|word| template.contains(word));
        match names_media || loops_over_content_of(template, &["message", "msg", "m"]) {
            true => ContentFormat::Parts,
            false => ContentFormat::Text,
        }
    },
};

impl Table {
    /// An engine's.
    pub(super) fn of(engine: Engine) -> &'static Self {
        match engine {
            Engine::Vllm => &VLLM,
            Engine::Sglang => &SGLANG,
        }
    }

    /// The fields of a role's messages that are passed on.
    pub(super) fn fields_of(&self, role: &str) -> &'static [&'static str] {
        let row = self.fields.iter().find(|(of, _)| *of == role || of.is_empty());
        row.map_or(&[], |(_, fields)| fields)
    }
}
