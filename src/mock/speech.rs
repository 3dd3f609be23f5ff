//! What a mock replica says, and how it tokenizes when it has no tokenizer.
//!
//! An answer must come back as the same token ids when a client sends it as history. So the words
//! are single tokens of the model's own tokenizer, checked one by one when it is loaded, and the
//! first has no leading space, because some chat templates trim what the assistant said.

use super::engine::Vocabulary;
use crate::model::Model;
use crate::request::{self, Api};
use hashbrown::HashMap;
use serde_json::json;

/// The words of a replica.
#[derive(Debug)]
pub struct Speech {
    texts: HashMap<u32, String>,
    /// What the engine draws from.
    pub vocabulary: Vocabulary,
}

impl Speech {
    /// Plain English words, as far as each is one token of this model.
    ///
    /// # Errors
    /// When fewer than 16 words are left, or the tokenizer merges across them.
    pub fn of_model(model: &Model) -> Result<Self, String> {
        let mut speech = Self {
            texts: HashMap::new(),
            vocabulary: Vocabulary { first: [].into(), rest: [].into() },
        };
        let first = WORDS.split_whitespace().map(str::to_owned);
        let rest = WORDS.split_whitespace().map(|word| format!(" {word}"));
        speech.vocabulary.first = speech.single_tokens(model, first).into();
        speech.vocabulary.rest = speech.single_tokens(model, rest).into();
        let least = speech.vocabulary.first.len().min(speech.vocabulary.rest.len());
        if least < 16 {
            return Err(format!(
                "only {least} of the mock's words are single tokens of this model"
            ));
        }
        speech.check_together(model)?;
        Ok(speech)
    }

    /// Numbered words, for replicas without a tokenizer: token 1234 is " w1234".
    pub fn numbered() -> Self {
        Self { texts: HashMap::new(), vocabulary: Vocabulary::default() }
    }

    /// The text of an output token.
    pub fn text(&self, token: u32) -> String {
        self.texts.get(&token).cloned().unwrap_or_else(|| format!(" w{token}"))
    }

    /// Some tokenizers merge across words; then an answer would not come back as its own tokens.
    fn check_together(&self, model: &Model) -> Result<(), String> {
        let rest = self.vocabulary.rest.iter().rev().chain(self.vocabulary.rest.iter());
        let ids: Vec<u32> = self.vocabulary.first.iter().take(1).chain(rest).copied().collect();
        let text: String = ids.iter().map(|id| self.text(*id)).collect();
        if encode(model, &text, false)? == ids {
            Ok(())
        } else {
            Err("this model's tokenizer does not keep the mock's words apart".to_owned())
        }
    }

    fn single_tokens(&mut self, model: &Model, words: impl Iterator<Item = String>) -> Vec<u32> {
        let mut ids = Vec::new();
        for word in words {
            if let Ok([id]) = encode(model, &word, false).as_deref() {
                ids.push(*id);
                self.texts.insert(*id, word);
            }
        }
        ids
    }
}

/// Token ids of a text by a model's own tokenizer.
///
/// # Errors
/// What the tokenizer said.
pub fn encode(model: &Model, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
    let body = json!({ "prompt": text, "add_special_tokens": add_special_tokens }).to_string();
    let prompt =
        request::parse(Api::Completions, body.as_bytes()).map_err(|error| format!("{error:?}"))?;
    model.token_ids(&prompt, 0).map_err(|error| format!("{error:?}"))
}

/// Token ids of a text where there is no tokenizer: one per word, the inverse of
/// [`Speech::numbered`] for its own words.
pub fn numbered_tokens(text: &str) -> Vec<u32> {
    text.split_whitespace().map(numbered_token).collect()
}

fn numbered_token(word: &str) -> u32 {
    let number = word.strip_prefix('w').and_then(|digits| digits.parse().ok());
    number.unwrap_or_else(|| {
        // FNV-1a, folded into a vocabulary's usual range.
        let hash = word
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        10_000 + hash % 100_000
    })
}

const WORDS: &str = "\
    the a and to of in is it that this with for as on are be by or an at from not have we you they \
    can will all one which more about how what when where who time people way day year work world \
    life part place case week point number group problem fact water room money story month lot \
    right study book word issue side kind head house service friend father power hour game line \
    end member law car city community name team minute idea body information back parent face \
    others level office door health person art war history party result change morning reason \
    research moment air teacher force education good new first last long great little own other \
    old big high different small large next early young important few public bad same able make \
    know take see come think look want give use find tell ask seem feel try leave call keep let \
    begin show hear play run move live believe hold bring happen write provide sit stand lose pay \
    meet include continue set learn lead understand watch follow stop create speak read allow add \
    spend grow open walk win offer remember love consider appear buy wait serve die send expect \
    build stay fall cut reach kill remain";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_words_come_back_as_their_own_tokens() {
        let speech = Speech::numbered();
        let said: String = speech.vocabulary.rest.iter().map(|id| speech.text(*id)).collect();
        assert_eq!(numbered_tokens(&said), speech.vocabulary.rest.to_vec());
    }
}
