//! The library's syntax tree, as a [`Program`]. What is not done here becomes a node that ends the rendering where it is
//! reached: much of a template never is.

use super::program::{
    Filter, For, LoopField, Macro, Method, Name, Node, Operator, Program, Step, Test,
};
use hashbrown::HashMap;
use minijinja::machinery::ast::{
    BinOpKind, CallArg, CallType, CompareOpKind, Expr, ForLoop, Macro as MacroTree, Stmt,
    UnaryOpKind,
};
use minijinja::value::{Value, ValueKind};

/// What a whole template comes to.
pub(super) fn program(tree: &Stmt<'_>) -> Program {
    let (names, places, macros) = (Vec::new(), HashMap::new(), Vec::new());
    let mut compiler = Compiler { names, places, macros, depth: 0 };
    let steps = match tree {
        Stmt::Template(template) => compiler.steps(&template.children),
        _ => vec![Step::Beyond],
    };
    Program { steps, names: compiler.names, macros: compiler.macros }
}

struct Compiler {
    names: Vec<Box<str>>,
    /// Where each of them is: a template may have tens of thousands, and all are read in one go.
    places: HashMap<Box<str>, Name>,
    macros: Vec<Macro>,
    /// How many scopes there are around.
    depth: usize,
}

impl Compiler {
    fn name(&mut self, name: &str) -> Name {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        // A template is shorter than so many names.
        let place = Name::try_from(self.names.len()).unwrap_or(Name::MAX);
        self.names.push(name.into());
        self.places.insert(name.into(), place);
        place
    }

    fn steps(&mut self, statements: &[Stmt<'_>]) -> Vec<Step> {
        statements.iter().map(|statement| self.step(statement).unwrap_or(Step::Beyond)).collect()
    }

    fn within(&mut self, statements: &[Stmt<'_>]) -> Vec<Step> {
        self.depth += 1;
        let steps = self.steps(statements);
        self.depth -= 1;
        steps
    }

    fn step(&mut self, statement: &Stmt<'_>) -> Option<Step> {
        Some(match statement {
            Stmt::EmitRaw(raw) => Step::Text(raw.raw.into()),
            Stmt::EmitExpr(output) => Step::Output(self.node(&output.expr)),
            Stmt::IfCond(condition) => Step::If(
                self.node(&condition.expr),
                self.steps(&condition.true_body),
                self.steps(&condition.false_body),
            ),
            Stmt::ForLoop(each) => Step::For(Box::new(self.each(each)?)),
            Stmt::Set(set) => match &set.target {
                Expr::Var(_) => Step::Set(self.target(&set.target)?, self.node(&set.expr)),
                Expr::GetAttr(attribute) => {
                    let namespace = self.target(&attribute.expr)?;
                    let name = self.name(attribute.name);
                    Step::SetAttribute(namespace, name, self.node(&set.expr))
                }
                _ => return None,
            },
            Stmt::SetBlock(set) if set.filter.is_none() => {
                Step::Capture(self.target(&set.target)?, self.steps(&set.body))
            }
            Stmt::WithBlock(with) => {
                let mut variables = Vec::new();
                for (target, value) in &with.assignments {
                    variables.push((self.target(target)?, self.node(value)));
                }
                Step::With(variables, self.within(&with.body))
            }
            Stmt::Macro(tree) if self.depth == 0 => self.define(tree)?,
            Stmt::Break(_) => Step::Break,
            Stmt::Continue(_) => Step::Continue,
            _ => return None,
        })
    }

    fn each(&mut self, each: &ForLoop<'_>) -> Option<For> {
        if each.filter_expr.is_some() || each.recursive {
            return None;
        }
        let (targets, is_unpacked) = match &each.target {
            Expr::List(list) => {
                (list.items.iter().map(|target| self.target(target)).collect::<Option<_>>()?, true)
            }
            target => (vec![self.target(target)?], false),
        };
        Some(For {
            targets,
            is_unpacked,
            over: self.node(&each.iter),
            body: self.within(&each.body),
            otherwise: self.steps(&each.else_body),
        })
    }

    /// A variable that is set.
    fn target(&mut self, target: &Expr<'_>) -> Option<Name> {
        match target {
            // It would hide that of a loop.
            Expr::Var(variable) if variable.id != "loop" => Some(self.name(variable.id)),
            _ => None,
        }
    }

    /// A macro sees the variables of the outermost scope, as they are when it is called, and its own.
    fn define(&mut self, tree: &MacroTree<'_>) -> Option<Step> {
        let given = tree.args.len() - tree.defaults.len();
        let mut parameters = Vec::new();
        for (place, target) in tree.args.iter().enumerate() {
            let name = self.target(target)?;
            let otherwise = place.checked_sub(given).and_then(|place| tree.defaults.get(place));
            let otherwise = match otherwise {
                // The library finds out what else they may be before it has the parameters before them.
                Some(Expr::Const(constant)) => Some(self::constant(&constant.value)?),
                Some(_) => return None,
                None => None,
            };
            parameters.push((name, otherwise));
        }
        let body = self.within(&tree.body);
        self.macros.push(Macro { parameters, body });
        Some(Step::Macro(self.name(tree.name), self.macros.len() - 1))
    }

    fn node(&mut self, tree: &Expr<'_>) -> Node {
        self.some_node(tree).unwrap_or(Node::Beyond)
    }

    fn boxed(&mut self, tree: &Expr<'_>) -> Box<Node> {
        Box::new(self.node(tree))
    }

    fn some_node(&mut self, tree: &Expr<'_>) -> Option<Node> {
        Some(match tree {
            Expr::Const(constant) => self::constant(&constant.value)?,
            Expr::Var(variable) if variable.id == "loop" => return None,
            Expr::Var(variable) => Node::Variable(self.name(variable.id)),
            Expr::List(list) => Node::List(list.items.iter().map(|item| self.node(item)).collect()),
            Expr::GetAttr(attribute) => match &attribute.expr {
                Expr::Var(variable) if variable.id == "loop" => {
                    Node::Loop(of_name(&LOOP_FIELDS, attribute.name)?)
                }
                of => Node::Attribute(self.boxed(of), self.name(attribute.name)),
            },
            Expr::GetItem(item) => {
                Node::Item(self.boxed(&item.expr), self.boxed(&item.subscript_expr))
            }
            Expr::Slice(slice) => {
                let mut place = |place: &Option<Expr<'_>>| place.as_ref().map(|p| self.node(p));
                let places = [place(&slice.start), place(&slice.stop), place(&slice.step)];
                Node::Slice(Box::new(places), self.boxed(&slice.expr))
            }
            Expr::UnaryOp(unary) => match unary.op {
                UnaryOpKind::Not => Node::Not(self.boxed(&unary.expr)),
                UnaryOpKind::Neg => match self.node(&unary.expr) {
                    Node::Number(number) => Node::Number(number.checked_neg()?),
                    _ => return None,
                },
            },
            Expr::BinOp(binary) => {
                let (left, right) = (self.boxed(&binary.left), self.boxed(&binary.right));
                match binary.op {
                    BinOpKind::ScAnd => Node::And(left, right),
                    BinOpKind::ScOr => Node::Or(left, right),
                    operator => Node::Binary(self::operator(operator)?, left, right),
                }
            }
            Expr::Compare(compare) => {
                let [second] = compare.ops.as_slice() else { return None };
                let left = self.boxed(&compare.expr);
                Node::Binary(comparison(second.op), left, self.boxed(&second.expr))
            }
            Expr::IfExpr(choice) => {
                let both = [self.node(&choice.test_expr), self.node(&choice.true_expr)];
                let otherwise = choice.false_expr.as_ref().map(|otherwise| self.boxed(otherwise));
                Node::Choice(Box::new(both), otherwise)
            }
            Expr::Filter(filter) => {
                let value = self.boxed(filter.expr.as_ref()?);
                match (filter.name, filter.args.as_slice()) {
                    ("tojson", arguments) => {
                        Node::Filter(Filter::ToJson(indent(arguments)?), value, Vec::new())
                    }
                    (name, arguments) => {
                        Node::Filter(of_name(&FILTERS, name)?, value, self.arguments(arguments)?)
                    }
                }
            }
            Expr::Test(test) => {
                let value = self.boxed(&test.expr);
                Node::Test(of_name(&TESTS, test.name)?, value, self.arguments(&test.args)?)
            }
            Expr::Call(call) => match call.identify_call() {
                CallType::Method(value, name) => {
                    let value = self.boxed(value);
                    Node::Method(of_name(&METHODS, name)?, value, self.arguments(&call.args)?)
                }
                CallType::Function("namespace") => {
                    let mut fields = Vec::new();
                    for argument in &call.args {
                        let CallArg::Kwarg(name, value) = argument else { return None };
                        fields.push((self.name(name), self.node(value)));
                    }
                    Node::Namespace(fields)
                }
                CallType::Function(name) => {
                    let mut arguments = Vec::new();
                    for argument in &call.args {
                        arguments.push(match argument {
                            CallArg::Pos(value) => (None, self.node(value)),
                            CallArg::Kwarg(name, value) => {
                                (Some(self.name(name)), self.node(value))
                            }
                            _ => return None,
                        });
                    }
                    Node::Call(self.name(name), arguments)
                }
                CallType::Object(_) => return None,
            },
            Expr::Tuple(_) | Expr::Map(_) => return None,
        })
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) -> Option<Vec<Node>> {
        let mut nodes = Vec::new();
        for argument in arguments {
            let CallArg::Pos(value) = argument else { return None };
            nodes.push(self.node(value));
        }
        Some(nodes)
    }
}

fn constant(value: &Value) -> Option<Node> {
    Some(match value.kind() {
        ValueKind::None => Node::Null,
        ValueKind::Bool => Node::Bool(value.is_true()),
        ValueKind::String => Node::Text(value.as_str()?.into()),
        ValueKind::Number if value.is_integer() => Node::Number(value.as_i64()?),
        _ => return None,
    })
}

/// What `tojson` is told, where that is how far to indent, or what it does anyway.
fn indent(arguments: &[CallArg<'_>]) -> Option<Option<usize>> {
    let mut indent = None;
    for argument in arguments {
        let CallArg::Kwarg(name, Expr::Const(constant)) = argument else { return None };
        match *name {
            "indent" => indent = Some(constant.value.as_usize().filter(|indent| *indent <= 16)?),
            "ensure_ascii" if constant.value.kind() == ValueKind::Bool => {
                (!constant.value.is_true()).then_some(())?;
            }
            _ => return None,
        }
    }
    Some(indent)
}

/// What a name stands for.
fn of_name<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table.iter().find(|(known, _)| *known == name).map(|(_, it)| *it)
}

const LOOP_FIELDS: [(&str, LoopField); 7] = [
    ("index", LoopField::Index),
    ("index0", LoopField::Index0),
    ("first", LoopField::First),
    ("last", LoopField::Last),
    ("length", LoopField::Length),
    ("previtem", LoopField::Previous),
    ("nextitem", LoopField::Next),
];

const FILTERS: [(&str, Filter); 8] = [
    ("length", Filter::Length),
    ("count", Filter::Length),
    ("trim", Filter::Trim),
    ("text_to_join", Filter::TextToJoin),
    ("string", Filter::String),
    ("default", Filter::Default),
    ("d", Filter::Default),
    ("items", Filter::Items),
];

const TESTS: [(&str, Test); 17] = [
    ("defined", Test::Defined),
    ("undefined", Test::Undefined),
    ("none", Test::Null),
    ("string", Test::String),
    ("mapping", Test::Mapping),
    ("iterable", Test::HasItems),
    ("sequence", Test::HasItems),
    ("number", Test::Number),
    ("boolean", Test::Bool),
    ("true", Test::True),
    ("false", Test::False),
    ("eq", Test::Equal),
    ("equalto", Test::Equal),
    ("==", Test::Equal),
    ("ne", Test::Unequal),
    ("!=", Test::Unequal),
    ("in", Test::In),
];

const METHODS: [(&str, Method); 8] = [
    ("strip", Method::Strip { start: true, end: true }),
    ("lstrip", Method::Strip { start: true, end: false }),
    ("rstrip", Method::Strip { start: false, end: true }),
    ("startswith", Method::StartsWith),
    ("endswith", Method::EndsWith),
    ("split", Method::Split),
    ("get", Method::Get),
    ("items", Method::Items),
];

fn operator(operator: BinOpKind) -> Option<Operator> {
    Some(match operator {
        BinOpKind::Eq => Operator::Equal,
        BinOpKind::Ne => Operator::Unequal,
        BinOpKind::Lt => Operator::Less,
        BinOpKind::Lte => Operator::LessOrEqual,
        BinOpKind::Gt => Operator::Greater,
        BinOpKind::Gte => Operator::GreaterOrEqual,
        BinOpKind::In => Operator::In,
        BinOpKind::Add => Operator::Add,
        BinOpKind::Sub => Operator::Subtract,
        BinOpKind::Rem => Operator::Remainder,
        BinOpKind::Concat => Operator::Join,
        _ => return None,
    })
}

fn comparison(operator: CompareOpKind) -> Operator {
    match operator {
        CompareOpKind::Eq => Operator::Equal,
        CompareOpKind::Ne => Operator::Unequal,
        CompareOpKind::Lt => Operator::Less,
        CompareOpKind::Lte => Operator::LessOrEqual,
        CompareOpKind::Gt => Operator::Greater,
        CompareOpKind::Gte => Operator::GreaterOrEqual,
        CompareOpKind::In => Operator::In,
        CompareOpKind::NotIn => Operator::NotIn,
    }
}
