//! A [`Program`] and a client's variables, to a text.

use super::program::{For, LoopField, Name, Node, Operator, Program, Step};
use super::value::{Items, Text, Value};
use super::{Beyond, Here, operators, texts};
use crate::request::field;
use crate::template::{FUEL, LEAST_ROOM, MAX_OUTPUT_BYTES, MOST_ROOM, clock};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

/// Functions that the library has: variables of these names are there, whoever sets none.
const FUNCTIONS: [&str; 6] =
    ["range", "dict", "debug", "namespace", "raise_exception", "strftime_now"];

/// How deep macros may call macros. In each there may be as much nesting as in a template, some 100 KB of the 1 MB stack;
/// no public template goes deeper than three.
const MAX_CALLS: usize = 4;

/// Bytes of text that count as much as a node.
pub(super) const BYTES_A_UNIT: usize = 64;

pub(super) fn render(
    program: &Program,
    special_tokens: &BTreeMap<String, String>,
    variables: &Map<String, Json>,
    now: u64,
) -> Here<String> {
    let global = |name: &str| {
        let token = || special_tokens.get(name).map(|text| Value::Text(Text::Plain(text)));
        let function = || FUNCTIONS.contains(&name).then_some(Value::Opaque);
        let variable = variables.get(name).map(Value::of);
        variable.or_else(token).or_else(function).unwrap_or(Value::Undefined)
    };
    let mut run = Run {
        program,
        globals: program.names.iter().map(|name| global(name)).collect(),
        now,
        locals: Vec::new(),
        scope: 0,
        outermost: None,
        own: None,
        loops: Vec::new(),
        namespaces: Vec::new(),
        calls: 0,
        out: String::new(),
        left: FUEL as usize,
    };
    run.all(&program.steps)?;
    Ok(run.out)
}

/// Where it goes on.
enum Flow {
    On,
    Break,
    Continue,
}

pub(super) struct Run<'a> {
    pub(super) program: &'a Program,
    /// By name.
    globals: Vec<Value<'a>>,
    now: u64,
    /// The variables of all scopes, the innermost last.
    locals: Vec<(Name, Value<'a>)>,
    /// Where those of the innermost scope begin.
    scope: usize,
    /// Where those of the outermost scope end, within any other.
    outermost: Option<usize>,
    /// Within a macro, where its own begin: of all others it sees those of the outermost scope.
    own: Option<usize>,
    pub(super) loops: Vec<Loop<'a>>,
    pub(super) namespaces: Vec<Vec<(Name, Value<'a>)>>,
    calls: usize,
    out: String,
    /// Work that may still be done.
    left: usize,
}

/// What was before a scope.
struct Outer {
    scope: usize,
    end: usize,
    outermost: Option<usize>,
}

pub(super) struct Loop<'a> {
    pub(super) items: Items<'a>,
    pub(super) place: usize,
}

impl<'a> Run<'a> {
    pub(super) fn spend(&mut self, units: usize) -> Here<()> {
        self.left = self.left.checked_sub(units).ok_or(Beyond)?;
        Ok(())
    }

    #[inline(never)]
    fn write(&mut self, text: &str) -> Here<()> {
        if self.out.len() + text.len() > MAX_OUTPUT_BYTES {
            return Err(Beyond);
        }
        if self.out.capacity() - self.out.len() < text.len() {
            // By more than a text grows by itself: each time all that is there is copied.
            self.out.reserve(text.len() + (3 * self.out.len()).clamp(LEAST_ROOM, MOST_ROOM));
        }
        self.out.push_str(text);
        Ok(())
    }

    fn steps(&mut self, steps: &'a [Step]) -> Here<Flow> {
        for step in steps {
            match self.step(step)? {
                Flow::On => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::On)
    }

    fn step(&mut self, step: &'a Step) -> Here<Flow> {
        self.spend(1)?;
        match step {
            Step::Text(text) => self.write(text)?,
            Step::Output(node) => match self.text(node) {
                Some(text) => {
                    self.spend(text.len() / BYTES_A_UNIT)?;
                    self.write(text)?;
                }
                None => self.output(node)?,
            },
            Step::If(condition, yes, no) => {
                let steps = if self.condition(condition)? { yes } else { no };
                return self.steps(steps);
            }
            Step::For(each) => return self.each(each),
            Step::Set(name, node) => {
                let value = self.node(node)?;
                self.set(*name, value);
            }
            Step::SetAttribute(name, attribute, node) => {
                let value = self.node(node)?;
                let Value::Namespace(place) = self.variable(*name) else { return Err(Beyond) };
                let fields = self.namespaces.get_mut(place).ok_or(Beyond)?;
                match fields.iter_mut().find(|(name, _)| name == attribute) {
                    Some((_, field)) => *field = value,
                    None => fields.push((*attribute, value)),
                }
            }
            Step::Capture(name, body) => {
                let text = self.captured(body)?;
                self.set(*name, Value::made(text));
            }
            Step::With(variables, body) => {
                let outer = self.enter();
                for (name, node) in variables {
                    let value = self.node(node)?;
                    self.set(*name, value);
                }
                self.all(body)?;
                self.leave(outer);
            }
            Step::Macro(name, place) => self.set(*name, Value::Macro(*place)),
            Step::Break => return Ok(Flow::Break),
            Step::Continue => return Ok(Flow::Continue),
            Step::Beyond => return Err(Beyond),
        }
        Ok(Flow::On)
    }

    fn output(&mut self, node: &'a Node) -> Here<()> {
        match self.node(node)? {
            Value::Text(text) => self.write(text.as_str()),
            Value::Undefined => Ok(()),
            Value::Null => self.write("None"),
            Value::Bool(value) => self.write(if value { "True" } else { "False" }),
            Value::Number(number) => self.write(&number.to_string()),
            _ => Err(Beyond),
        }
    }

    /// Steps that do not leave a loop around them.
    fn all(&mut self, steps: &'a [Step]) -> Here<()> {
        match self.steps(steps)? {
            Flow::On => Ok(()),
            Flow::Break | Flow::Continue => Err(Beyond),
        }
    }

    /// What these write.
    fn captured(&mut self, steps: &'a [Step]) -> Here<String> {
        let outer = std::mem::take(&mut self.out);
        self.all(steps)?;
        Ok(std::mem::replace(&mut self.out, outer))
    }

    /// Begins a scope. What is to be put back at its end.
    fn enter(&mut self) -> Outer {
        let end = self.locals.len();
        let outer = Outer { scope: self.scope, end, outermost: self.outermost };
        self.scope = end;
        self.outermost.get_or_insert(end);
        outer
    }

    fn leave(&mut self, outer: Outer) {
        self.scope = outer.scope;
        self.outermost = outer.outermost;
        self.locals.truncate(outer.end);
    }

    fn each(&mut self, each: &'a For) -> Here<Flow> {
        let items = self.node(&each.over)?.items()?;
        if items.len() == 0 {
            return self.steps(&each.otherwise);
        }
        let outer = self.enter();
        self.loops.push(Loop { items: items.clone(), place: 0 });
        for place in 0..items.len() {
            self.spend(1)?;
            // What an iteration has set is gone with it.
            self.locals.truncate(self.scope);
            if let Some(current) = self.loops.last_mut() {
                current.place = place;
            }
            let item = items.get(place);
            match each.targets.as_slice() {
                [target] if !each.is_unpacked => self.locals.push((*target, item)),
                targets => {
                    let (Value::Items(_) | Value::List(_)) = &item else { return Err(Beyond) };
                    let parts = item.items()?;
                    if parts.len() != targets.len() {
                        return Err(Beyond);
                    }
                    for (place, target) in targets.iter().enumerate() {
                        self.set(*target, parts.get(place));
                    }
                }
            }
            if let Flow::Break = self.steps(&each.body)? {
                // The library takes a loop that was left at its first item for one that had none.
                if place == 0 && !each.otherwise.is_empty() {
                    return Err(Beyond);
                }
                break;
            }
        }
        self.loops.pop();
        self.leave(outer);
        Ok(Flow::On)
    }

    fn set(&mut self, name: Name, value: Value<'a>) {
        let own = self.locals.get_mut(self.scope..).unwrap_or_default();
        match own.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.locals.push((name, value)),
        }
    }

    #[inline(never)]
    pub(super) fn found(&self, name: Name) -> Option<&Value<'a>> {
        // Within a macro, others than its own and the outermost ones are out of sight.
        let hidden = match (self.outermost, self.own) {
            (Some(outermost), Some(own)) => outermost..own,
            _ => 0..0,
        };
        let mut locals = self.locals.iter().enumerate().rev();
        let found = locals
            .find(|(place, (known, _))| *known == name && !hidden.contains(place))
            .map(|(_, (_, value))| value);
        found.or_else(|| self.globals.get(usize::from(name)))
    }

    fn variable(&self, name: Name) -> Value<'a> {
        self.found(name).cloned().unwrap_or(Value::Undefined)
    }

    pub(super) fn node(&mut self, node: &'a Node) -> Here<Value<'a>> {
        self.spend(1)?;
        Ok(match node {
            Node::Text(text) => Value::Text(Text::Plain(text)),
            Node::Number(number) => Value::Number(*number),
            Node::Bool(value) => Value::Bool(*value),
            Node::Null => Value::Null,
            Node::List(items) => Value::List(self.nodes(items)?.into()),
            Node::Variable(name) => self.variable(*name),
            Node::Loop(field) => self.loop_field(*field)?,
            Node::Attribute(of, name) => {
                let value = self.node(of)?;
                self.attribute(&value, *name)?
            }
            Node::Item(of, key) => {
                let of = self.node(of)?;
                operators::item(&of, &self.node(key)?)?
            }
            Node::Slice(places, of) => {
                let of = self.node(of)?;
                let mut numbers = [None; 3];
                for (number, place) in numbers.iter_mut().zip(places.iter()) {
                    *number = match place {
                        Some(place) => Some(self.node(place)?.number()?),
                        None => None,
                    };
                }
                self.spend_on(&of)?;
                operators::slice(&of, numbers)?
            }
            Node::Not(node) => Value::Bool(!self.condition(node)?),
            Node::And(left, right) => match self.node(left)? {
                left if left.is_true()? => self.node(right)?,
                left => left,
            },
            Node::Or(left, right) => match self.node(left)? {
                left if left.is_true()? => left,
                _ => self.node(right)?,
            },
            Node::Binary(operator, left, right) => {
                if let Operator::Subtract = operator
                    && let Some(number) = self.number(node)
                {
                    return Ok(Value::Number(number));
                }
                let (left, right) = (self.node(left)?, self.node(right)?);
                self.spend_on(&left)?;
                self.spend_on(&right)?;
                operators::apply(*operator, &left, &right)?
            }
            Node::Choice(both, otherwise) => {
                let [condition, yes] = &**both;
                match otherwise {
                    _ if self.condition(condition)? => self.node(yes)?,
                    Some(otherwise) => self.node(otherwise)?,
                    None => Value::Undefined,
                }
            }
            Node::Filter(filter, value, arguments) => {
                let value = self.node(value)?;
                self.spend_on(&value)?;
                texts::filter(*filter, &value, &self.nodes(arguments)?)?
            }
            Node::Test(test, value, arguments) => {
                let value = self.node(value)?;
                Value::Bool(texts::test(*test, &value, &self.nodes(arguments)?)?)
            }
            Node::Method(method, value, arguments) => {
                let value = self.node(value)?;
                self.spend_on(&value)?;
                texts::method(*method, &value, &self.nodes(arguments)?)?
            }
            Node::Namespace(fields) => {
                let mut values = Vec::new();
                for (name, node) in fields {
                    values.push((*name, self.node(node)?));
                }
                self.namespaces.push(values);
                Value::Namespace(self.namespaces.len() - 1)
            }
            Node::Call(name, arguments) => self.call(*name, arguments)?,
            Node::Beyond => return Err(Beyond),
        })
    }

    fn nodes(&mut self, nodes: &'a [Node]) -> Here<Vec<Value<'a>>> {
        let mut values = Vec::with_capacity(nodes.len());
        for node in nodes {
            values.push(self.node(node)?);
        }
        Ok(values)
    }

    /// Counts what is done with a value's text, or with its items.
    #[inline(never)]
    fn spend_on(&mut self, value: &Value<'_>) -> Here<()> {
        match value {
            Value::Text(text) => self.spend(text.as_str().len() / BYTES_A_UNIT),
            Value::Items(items) => self.spend(items.len()),
            Value::List(items) => self.spend(items.len()),
            Value::Object(fields) => self.spend(fields.len()),
            _ => Ok(()),
        }
    }

    fn attribute(&self, value: &Value<'a>, name: Name) -> Here<Value<'a>> {
        Ok(match value {
            Value::Object(fields) => {
                let name = self.program.names.get(usize::from(name)).ok_or(Beyond)?;
                Value::of_option(field(fields, name))
            }
            Value::Namespace(place) => {
                let fields = self.namespaces.get(*place).ok_or(Beyond)?;
                let field = fields.iter().find(|(known, _)| *known == name);
                field.map_or(Value::Undefined, |(_, value)| value.clone())
            }
            Value::Undefined | Value::Macro(_) | Value::Opaque => return Err(Beyond),
            _ => Value::Undefined,
        })
    }

    fn loop_field(&self, field: LoopField) -> Here<Value<'a>> {
        let Loop { items, place } = self.loops.last().ok_or(Beyond)?;
        Ok(match field {
            LoopField::Index => Value::count(place + 1),
            LoopField::Index0 => Value::count(*place),
            LoopField::First => Value::Bool(*place == 0),
            LoopField::Last => Value::Bool(place + 1 == items.len()),
            LoopField::Length => Value::count(items.len()),
            LoopField::Previous => {
                place.checked_sub(1).map_or(Value::Undefined, |place| items.get(place))
            }
            LoopField::Next => items.get(place + 1),
        })
    }

    fn call(&mut self, name: Name, arguments: &'a [(Option<Name>, Node)]) -> Here<Value<'a>> {
        let called = match self.variable(name) {
            Value::Macro(place) => self.program.macros.get(place).ok_or(Beyond)?,
            Value::Opaque => return self.time(name, arguments),
            _ => return Err(Beyond),
        };
        let mut given: Vec<Option<Value<'a>>> = Vec::new();
        given.resize_with(called.parameters.len(), || None);
        for (place, (name, node)) in arguments.iter().enumerate() {
            let named = |name| called.parameters.iter().position(|(known, _)| *known == name);
            let place = name.map_or(Some(place), named).ok_or(Beyond)?;
            let value = self.node(node)?;
            let slot = given.get_mut(place).filter(|slot| slot.is_none()).ok_or(Beyond)?;
            *slot = Some(value);
        }
        if self.calls == MAX_CALLS {
            return Err(Beyond);
        }
        self.calls += 1;
        let outer = self.enter();
        let around = (self.own.replace(self.scope), std::mem::take(&mut self.loops));
        for ((name, otherwise), value) in called.parameters.iter().zip(given) {
            let value = match (value.unwrap_or(Value::Undefined), otherwise) {
                (Value::Undefined, Some(otherwise)) => self.node(otherwise)?,
                (value, _) => value,
            };
            self.set(*name, value);
        }
        let text = self.captured(&called.body)?;
        (self.own, self.loops) = around;
        self.leave(outer);
        self.calls -= 1;
        Ok(Value::made(text))
    }

    /// `strftime_now`, the one function beside macros.
    fn time(&mut self, name: Name, arguments: &'a [(Option<Name>, Node)]) -> Here<Value<'a>> {
        let name = self.program.names.get(usize::from(name));
        match (name.map(|name| &**name), arguments) {
            (Some("strftime_now"), [(None, format)]) => {
                let format = self.node(format)?;
                clock::strftime(format.text()?, self.now).map(Value::made).ok_or(Beyond)
            }
            _ => Err(Beyond),
        }
    }
}
