//! Patterns as a `tokenizer.json` spells them, to programs. Runs where files are prepared.
//!
//! It reads what pre-tokenizers are made of: alternatives, groups, classes, repetition, look-aheads, a look-behind of one
//! character. What it does not know it refuses by name; a class is read by `regex-syntax`.

use super::{Classes, MAX_CLASSES, Op, PAGE, PAGES, Program};
use hashbrown::HashMap;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, HirKind};

/// Most steps of a program: repetitions of groups are written out.
const MAX_OPS: usize = 4_096;

/// A pattern's syntax.
#[derive(Debug, Clone)]
enum Node {
    Class(ClassUnicode),
    Sequence(Vec<Node>),
    Either(Vec<Node>),
    Repeat { node: Box<Node>, least: u32, most: Option<u32>, style: Style },
    Ahead { node: Box<Node>, negated: bool },
    Behind { class: ClassUnicode, negated: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Greedy,
    Lazy,
    Keeping,
}

/// Compiles the patterns of one tokenizer, which share their classes.
#[derive(Default)]
pub(in crate::tokens) struct Compiler {
    classes: Vec<ClassUnicode>,
}

impl Compiler {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// When it has something that is not known here.
    pub fn pattern(&mut self, pattern: &str) -> Result<Program, String> {
        let mut parser = Parser { rest: pattern, ignores_case: false };
        let node = parser.alternatives()?;
        match parser.rest.chars().next() {
            Some(c) => Err(format!("{c:?} without its opening")),
            None => self.program(&node),
        }
    }

    /// A pattern that is nothing but a text.
    pub fn text(&mut self, text: &str) -> Result<Program, String> {
        let characters = text.chars().map(|c| Node::Class(single(c))).collect();
        self.program(&Node::Sequence(characters))
    }

    /// A pattern of one character, of those that `belongs` says.
    pub fn one(&mut self, belongs: impl Fn(char) -> bool) -> Result<Program, String> {
        self.program(&Node::Class(class_of(belongs)))
    }

    /// The words of `Whitespace`, whose idea of a word character is Rust's.
    pub fn words(&mut self) -> Result<Program, String> {
        let mut runs = Vec::new();
        for class in [r"\w", r"[^\w\s]"] {
            runs.push(parse_class(class, false)?);
        }
        let runs = runs.into_iter().map(|class| Node::Repeat {
            node: Box::new(Node::Class(class)),
            least: 1,
            most: None,
            style: Style::Greedy,
        });
        self.program(&Node::Either(runs.collect()))
    }

    /// A pattern of some characters, as many as there are.
    pub fn some(&mut self, least: u32, most: Option<u32>) -> Result<Program, String> {
        let node = Box::new(Node::Class(class_of(|_| true)));
        self.program(&Node::Repeat { node, least, most, style: Style::Greedy })
    }

    /// The number of a class.
    pub fn class(&mut self, class: &str) -> Result<u8, String> {
        let class = read_class(class, false)?;
        self.number(&class)
    }

    /// Whether a program never reads, nor looks at, a character that `belongs`.
    pub fn avoids(&self, program: &Program, belongs: impl Fn(char) -> bool) -> bool {
        program.ops.iter().all(|op| match *op {
            Op::One(class) | Op::Many { class, .. } => {
                let ranges = self.classes.get(usize::from(class)).map(ClassUnicode::ranges);
                let mut ranges = ranges.unwrap_or_default().iter();
                !ranges.any(|range| (range.start()..=range.end()).any(&belongs))
            }
            Op::Ahead { .. } | Op::Behind { .. } => false,
            Op::Either(..) | Op::Go(_) | Op::End => true,
        })
    }

    /// The table of the classes of all programs.
    pub fn table(&self) -> Classes {
        let mut pages = Vec::with_capacity(PAGES);
        let mut masks: Vec<u32> = vec![0; PAGE];
        let mut known: HashMap<Vec<u32>, u16> = HashMap::new();
        known.insert(vec![0; PAGE], 0);
        let mut all = vec![0_u32; PAGES * PAGE];
        for (bit, class) in self.classes.iter().enumerate() {
            for range in class.ranges() {
                let places = range.start() as usize..=range.end() as usize;
                all.get_mut(places).into_iter().flatten().for_each(|mask| *mask |= 1 << bit);
            }
        }
        for page in all.chunks(PAGE) {
            let next = (masks.len() / PAGE) as u16;
            let number = *known.entry(page.to_vec()).or_insert(next);
            if number == next {
                masks.extend_from_slice(page);
            }
            pages.push(number);
        }
        Classes { pages, masks }
    }

    fn program(&mut self, node: &Node) -> Result<Program, String> {
        let mut ops = Vec::new();
        self.emit(node, &mut ops)?;
        ops.push(Op::End);
        if may_be_empty(node) {
            return Err("matches the empty text".to_owned());
        }
        let first = match first(node) {
            Some(class) => Some(self.number(&class)?),
            None => None,
        };
        Ok(Program { ops, first })
    }

    fn number(&mut self, class: &ClassUnicode) -> Result<u8, String> {
        if let Some(at) = self.classes.iter().position(|known| known == class) {
            return Ok(at as u8);
        }
        if self.classes.len() == MAX_CLASSES {
            return Err(format!("more than {MAX_CLASSES} classes of characters"));
        }
        self.classes.push(class.clone());
        Ok(self.classes.len() as u8 - 1)
    }

    fn emit(&mut self, node: &Node, ops: &mut Vec<Op>) -> Result<(), String> {
        if ops.len() > MAX_OPS {
            return Err("too long a pattern".to_owned());
        }
        match node {
            Node::Class(class) => ops.push(Op::One(self.number(class)?)),
            Node::Sequence(nodes) => {
                for node in nodes {
                    self.emit(node, ops)?;
                }
            }
            Node::Either(nodes) => self.either(nodes, ops)?,
            Node::Repeat { node, least, most, style } => {
                self.repeat(node, *least, *most, *style, ops)?;
            }
            Node::Ahead { node, negated } => {
                let at = ops.len();
                ops.push(Op::End);
                self.emit(node, ops)?;
                ops.push(Op::End);
                let ahead = Op::Ahead { negated: *negated, end: ops.len() as u32 };
                set(ops, at, ahead);
            }
            Node::Behind { class, negated } => {
                ops.push(Op::Behind { class: self.number(class)?, negated: *negated });
            }
        }
        Ok(())
    }

    fn either(&mut self, nodes: &[Node], ops: &mut Vec<Op>) -> Result<(), String> {
        let mut ends = Vec::new();
        for (index, node) in nodes.iter().enumerate() {
            if index + 1 == nodes.len() {
                self.emit(node, ops)?;
                continue;
            }
            let at = ops.len();
            ops.push(Op::End);
            self.emit(node, ops)?;
            ends.push(ops.len());
            ops.push(Op::End);
            let second = ops.len() as u32;
            set(ops, at, Op::Either(at as u32 + 1, second));
        }
        let end = ops.len() as u32;
        ends.into_iter().for_each(|at| set(ops, at, Op::Go(end)));
        Ok(())
    }

    fn repeat(
        &mut self,
        node: &Node,
        least: u32,
        most: Option<u32>,
        style: Style,
        ops: &mut Vec<Op>,
    ) -> Result<(), String> {
        if let (Node::Class(class), Style::Greedy | Style::Keeping) = (node, style) {
            let most = most.unwrap_or(u32::MAX);
            let class = self.number(class)?;
            ops.push(Op::Many { class, least, most, keeps: style == Style::Keeping });
            return Ok(());
        }
        if style == Style::Keeping {
            return Err("a possessive group".to_owned());
        }
        if may_be_empty(node) {
            return Err("a repeated group that may be empty".to_owned());
        }
        let way = |inside: usize, outside: usize| match style {
            Style::Lazy => Op::Either(outside as u32, inside as u32),
            _ => Op::Either(inside as u32, outside as u32),
        };
        for _ in 0..least {
            self.emit(node, ops)?;
        }
        let mut places = Vec::new();
        for _ in 0..most.map_or(1, |most| most.saturating_sub(least)) {
            places.push(ops.len());
            ops.push(Op::End);
            self.emit(node, ops)?;
            if most.is_none() {
                ops.push(Op::Go(places.last().copied().unwrap_or(0) as u32));
            }
        }
        let end = ops.len();
        places.into_iter().for_each(|at| set(ops, at, way(at + 1, end)));
        Ok(())
    }
}

fn set(ops: &mut [Op], at: usize, op: Op) {
    if let Some(place) = ops.get_mut(at) {
        *place = op;
    }
}

fn may_be_empty(node: &Node) -> bool {
    match node {
        Node::Class(_) => false,
        Node::Sequence(nodes) => nodes.iter().all(may_be_empty),
        Node::Either(nodes) => nodes.iter().any(may_be_empty),
        Node::Repeat { node, least, .. } => *least == 0 || may_be_empty(node),
        Node::Ahead { .. } | Node::Behind { .. } => true,
    }
}

/// The characters that a match starts with; `None` where that is not easily said.
fn first(node: &Node) -> Option<ClassUnicode> {
    match node {
        Node::Class(class) => Some(class.clone()),
        Node::Sequence(nodes) => {
            let mut union = ClassUnicode::empty();
            for node in nodes {
                union.union(&first(node)?);
                if !may_be_empty(node) {
                    break;
                }
            }
            Some(union)
        }
        Node::Either(nodes) => {
            let mut union = ClassUnicode::empty();
            for node in nodes {
                union.union(&first(node)?);
            }
            Some(union)
        }
        Node::Repeat { node, .. } => first(node),
        Node::Ahead { .. } | Node::Behind { .. } => None,
    }
}

fn single(character: char) -> ClassUnicode {
    ClassUnicode::new([ClassUnicodeRange::new(character, character)])
}

fn class_of(belongs: impl Fn(char) -> bool) -> ClassUnicode {
    let all = ('\0'..=char::MAX).filter(|&c| belongs(c));
    ClassUnicode::new(all.map(|c| ClassUnicodeRange::new(c, c)))
}

/// A class by `regex-syntax`, whose `\w` is another than Oniguruma's in eight characters.
fn read_class(text: &str, ignores_case: bool) -> Result<ClassUnicode, String> {
    const WORD: &str = r"[[\w\xB2\xB3\xB9\xBC-\xBE]&&[^\u200C\u200D]]";
    const NO_WORD: &str = r"[[^\w\xB2\xB3\xB9\xBC-\xBE][\u200C\u200D]]";
    if text.contains("[:") {
        return Err(format!("class {text:?}"));
    }
    let text = text.replace(r"\w", WORD).replace(r"\W", NO_WORD);
    parse_class(&text, ignores_case)
}

/// A class as `regex-syntax` has it.
fn parse_class(text: &str, ignores_case: bool) -> Result<ClassUnicode, String> {
    let mut parser = regex_syntax::ParserBuilder::new();
    let hir = parser.case_insensitive(ignores_case).build().parse(text);
    let hir = hir.map_err(|_| format!("class {text:?}"))?;
    match hir.kind() {
        HirKind::Class(Class::Unicode(class)) => Ok(class.clone()),
        HirKind::Class(Class::Bytes(class)) => {
            class.to_unicode_class().ok_or_else(|| format!("class {text:?}"))
        }
        HirKind::Literal(literal) => {
            let mut characters = std::str::from_utf8(&literal.0).unwrap_or_default().chars();
            match (characters.next(), characters.next()) {
                (Some(c), None) => Ok(single(c)),
                _ => Err(format!("class {text:?}")),
            }
        }
        _ => Err(format!("class {text:?}")),
    }
}

struct Parser<'p> {
    rest: &'p str,
    ignores_case: bool,
}

impl Parser<'_> {
    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn alternatives(&mut self) -> Result<Node, String> {
        let mut nodes = vec![self.sequence()?];
        while self.take("|") {
            nodes.push(self.sequence()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Either(nodes) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut nodes = Vec::new();
        while !self.rest.is_empty() && !self.rest.starts_with(['|', ')']) {
            let node = self.atom()?;
            nodes.push(self.repeated(node)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn repeated(&mut self, node: Node) -> Result<Node, String> {
        let (least, most) = match self.rest.chars().next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.bounds()?,
            _ => return Ok(node),
        };
        let counted = self.rest.starts_with('{');
        let length = if counted { self.rest.find('}').unwrap_or(0) + 1 } else { 1 };
        self.rest = self.rest.get(length..).unwrap_or_default();
        let style = match (self.rest.chars().next(), counted) {
            (Some('?'), _) => Style::Lazy,
            (Some('+'), false) => Style::Keeping,
            // Ruby reads this as a repetition of the repetition.
            (Some('+' | '*' | '{'), _) => return Err("a repeated repetition".to_owned()),
            _ => Style::Greedy,
        };
        if style != Style::Greedy {
            self.rest = self.rest.get(1..).unwrap_or_default();
        }
        if matches!(node, Node::Ahead { .. } | Node::Behind { .. }) {
            return Err("a repeated look-around".to_owned());
        }
        Ok(Node::Repeat { node: Box::new(node), least, most, style })
    }

    /// The bounds in braces, which are left where they are.
    fn bounds(&self) -> Result<(u32, Option<u32>), String> {
        let wrong = || "braces that are no repetition".to_owned();
        let inside = self.rest.get(1..self.rest.find('}').ok_or_else(wrong)?).unwrap_or_default();
        let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        match inside.split_once(',') {
            None => number(inside).map(|count| (count, Some(count))),
            Some((least, "")) => Ok((number(least)?, None)),
            Some(("", most)) => Ok((0, Some(number(most)?))),
            Some((least, most)) => {
                let (least, most) = (number(least)?, number(most)?);
                if least > most { Err(wrong()) } else { Ok((least, Some(most))) }
            }
        }
    }

    fn atom(&mut self) -> Result<Node, String> {
        let first = self.rest.chars().next().unwrap_or_default();
        let length = match first {
            '(' => return self.group(),
            '*' | '+' | '?' | '{' => return Err(format!("{first:?} with nothing to repeat")),
            '^' | '$' => return Err(format!("the anchor {first:?}")),
            '.' => {
                self.rest = self.rest.get(1..).unwrap_or_default();
                return Ok(Node::Class(class_of(|c| c != '\n')));
            }
            '[' => self.bracket()?,
            '\\' => self.escape()?,
            other => other.len_utf8(),
        };
        let text = self.rest.get(..length).unwrap_or_default();
        self.rest = self.rest.get(length..).unwrap_or_default();
        // Alone, some of these mean something to `regex-syntax`.
        let class = match matches!(text, "]" | "}" | ")") {
            true => single(first),
            false => read_class(text, self.ignores_case)?,
        };
        Ok(Node::Class(class))
    }

    fn group(&mut self) -> Result<Node, String> {
        let case = self.ignores_case;
        let openings = ["(?:", "(?i:", "(?-i:", "(?=", "(?!", "(?<=", "(?<!", "(?i)"];
        let opening = openings.into_iter().find(|opening| self.take(opening));
        let opening = match opening {
            Some(opening) => opening,
            None if !self.rest.starts_with("(?") && self.take("(") => "(",
            None => return Err(format!("the group {:?}", self.rest.get(..3).unwrap_or("("))),
        };
        match opening {
            "(?i)" => {
                // To the end of the group that it stands in.
                self.ignores_case = true;
                let rest = self.alternatives()?;
                self.ignores_case = case;
                return Ok(rest);
            }
            "(?i:" => self.ignores_case = true,
            "(?-i:" => self.ignores_case = false,
            _ => {}
        }
        let node = self.alternatives()?;
        self.ignores_case = case;
        if !self.take(")") {
            return Err("a group without its end".to_owned());
        }
        match (opening, node) {
            ("(?=", node) => Ok(Node::Ahead { node: Box::new(node), negated: false }),
            ("(?!", node) => Ok(Node::Ahead { node: Box::new(node), negated: true }),
            ("(?<=" | "(?<!", Node::Class(class)) => {
                Ok(Node::Behind { class, negated: opening == "(?<!" })
            }
            ("(?<=" | "(?<!", _) => Err("a look-behind of more than one character".to_owned()),
            (_, node) => Ok(node),
        }
    }

    /// The length of a class in brackets.
    fn bracket(&self) -> Result<usize, String> {
        let mut depth = 0;
        let mut characters = self.rest.char_indices().peekable();
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => {
                    let escaped = characters.next().map(|(_, c)| c);
                    if matches!(escaped, Some('h' | 'H' | 'R' | 'X' | 'b' | 'B')) {
                        return Err(format!("the escape \\{}", escaped.unwrap_or_default()));
                    }
                }
                '[' => depth += 1,
                ']' if depth == 1 => return Ok(at + 1),
                ']' => depth -= 1,
                _ => {}
            }
        }
        Err("a class without its end".to_owned())
    }

    /// The length of an escape.
    fn escape(&self) -> Result<usize, String> {
        let escaped = self.rest.chars().nth(1).ok_or("a \\ at the end")?;
        let braced = self.rest.get(2..).is_some_and(|rest| rest.starts_with('{'));
        match escaped {
            'p' | 'P' | 'x' | 'u' if braced => {
                let end = self.rest.find('}').ok_or("braces without their end")?;
                Ok(end + 1)
            }
            'x' => Ok(4),
            'u' => Ok(6),
            'd' | 'D' | 's' | 'S' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'v' => Ok(2),
            other if other.is_ascii_alphanumeric() => Err(format!("the escape \\{other}")),
            other => Ok(1 + other.len_utf8()),
        }
    }
}
