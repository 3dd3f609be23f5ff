//! What nodes come to where no value need be made of it: texts where they lie, places and lengths, and conditions of these.
//!
//! Most nodes of a chat's template are that. It knows nothing that [`Run::node`] does not: what it cannot tell is left to
//! that.

use super::program::{Filter, LoopField, Node, Operator, Test};
use super::run::{BYTES_A_UNIT, Loop, Run};
use super::value::{Text, Value};
use super::{Beyond, Here};
use crate::request::field;

impl<'a> Run<'a> {
    /// The text that a node is, where it stands in the template, in the client's JSON or in a variable.
    pub(super) fn text(&self, node: &'a Node) -> Option<&'a str> {
        match node {
            Node::Text(text) => Some(text),
            Node::Variable(name) => match self.found(*name)? {
                Value::Text(Text::Plain(text)) => Some(text),
                _ => None,
            },
            Node::Attribute(of, name) => {
                let Node::Variable(of) = **of else { return None };
                let Value::Object(fields) = self.found(of)? else { return None };
                let name = self.program.names.get(usize::from(*name))?;
                field(fields, name)?.as_str()
            }
            Node::Filter(Filter::TextToJoin, of, arguments) if arguments.is_empty() => {
                self.text(of)
            }
            _ => None,
        }
    }

    /// The whole number that a node is, if it is one of the template's, of a loop, a length, or one of these less another.
    pub(super) fn number(&mut self, node: &'a Node) -> Option<i64> {
        self.spend(1).ok()?;
        match node {
            Node::Number(number) => Some(*number),
            Node::Loop(field) => {
                let Loop { items, place } = self.loops.last()?;
                let number = match field {
                    LoopField::Index => place + 1,
                    LoopField::Index0 => *place,
                    LoopField::Length => items.len(),
                    _ => return None,
                };
                i64::try_from(number).ok()
            }
            Node::Variable(name) => number_of(self.found(*name)?),
            Node::Attribute(of, name) => {
                let Node::Variable(of) = **of else { return None };
                let Value::Namespace(place) = self.found(of)? else { return None };
                let fields = self.namespaces.get(*place)?;
                number_of(&fields.iter().find(|(known, _)| known == name)?.1)
            }
            Node::Filter(Filter::Length, of, arguments) if arguments.is_empty() => {
                let Node::Variable(of) = **of else { return None };
                let Value::Items(items) = self.found(of)? else { return None };
                i64::try_from(items.len()).ok()
            }
            Node::Binary(Operator::Subtract, left, right) => {
                self.number(left)?.checked_sub(self.number(right)?)
            }
            _ => None,
        }
    }

    /// Whether what a node comes to counts as true.
    pub(super) fn condition(&mut self, node: &'a Node) -> Here<bool> {
        self.spend(1)?;
        match node {
            Node::Not(node) => return Ok(!self.condition(node)?),
            Node::And(left, right) => return Ok(self.condition(left)? && self.condition(right)?),
            Node::Or(left, right) => return Ok(self.condition(left)? || self.condition(right)?),
            Node::Binary(operator @ (Operator::Equal | Operator::Unequal), left, right) => {
                if let (Some(left), Some(right)) = (self.text(left), self.text(right)) {
                    self.spend((left.len() + right.len()) / BYTES_A_UNIT)?;
                    return Ok((left == right) == matches!(operator, Operator::Equal));
                }
            }
            Node::Binary(operator @ (Operator::Less | Operator::Greater), left, right) => {
                if let (Some(left), Some(right)) = (self.number(left), self.number(right)) {
                    let is_less = matches!(operator, Operator::Less);
                    return Ok(if is_less { left < right } else { left > right });
                }
            }
            Node::Test(Test::String, of, arguments)
                if arguments.is_empty() && self.text(of).is_some() =>
            {
                return Ok(true);
            }
            Node::Attribute(of, name) => {
                if let Node::Variable(of) = **of
                    && let Some(Value::Object(fields)) = self.found(of)
                {
                    let name = self.program.names.get(usize::from(*name)).ok_or(Beyond)?;
                    return Value::of_option(field(fields, name)).is_true();
                }
            }
            _ => {}
        }
        self.node(node)?.is_true()
    }
}

fn number_of(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Number(number) => Some(*number),
        _ => None,
    }
}
