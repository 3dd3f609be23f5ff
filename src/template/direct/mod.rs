//! A chat template, evaluated on the client's JSON as it stands.
//!
//! The Jinja library makes values of its own of a whole conversation, and takes some microseconds for each message of it
//! at every turn. Chat templates do little: they compare roles, and write texts one behind the other. What they do in
//! all but rare cases is done here, on texts that are borrowed from the body and from the template.
//!
//! It decides nothing about Jinja. The syntax tree is the library's own, and what is not done here exactly as there (a
//! statement, a filter, an operator with values of other kinds, a message raised, whatever would fail) ends the
//! rendering without a text: then the library does all of it. So a text from here is the library's text, and every error
//! is the library's. It bounds its work and its output as the library's are bounded.

mod compile;
mod operators;
mod plain;
mod program;
mod run;
mod texts;
mod value;

use super::TemplateError;
use minijinja::syntax::SyntaxConfig;
use program::Program;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

/// Something that is left to the library.
#[derive(Debug)]
struct Beyond;

type Here<T> = Result<T, Beyond>;

/// A template that is evaluated here as far as that goes.
pub(super) struct Direct(Program);

impl Direct {
    /// Takes a source as the library is given it.
    pub(super) fn compile(source: &str, syntax: SyntaxConfig) -> Result<Self, TemplateError> {
        let tree = minijinja::machinery::parse(source, super::NAME, syntax)
            .map_err(|error| TemplateError::Syntax(error.to_string()))?;
        Ok(Self(compile::program(&tree)))
    }

    /// The text that the library would render, unless something is left to it.
    pub(super) fn render(
        &self,
        special_tokens: &BTreeMap<String, String>,
        variables: &Map<String, Json>,
        now: u64,
    ) -> Option<String> {
        run::render(&self.0, special_tokens, variables, now).ok()
    }
}

#[cfg(test)]
mod tests;
