//! What a template is compiled to. Names are numbers: a variable is looked for among few.

/// A variable.
pub(super) type Name = u16;

/// A whole template.
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    pub(super) names: Vec<Box<str>>,
    pub(super) macros: Vec<Macro>,
}

/// A macro of the outermost level.
#[derive(Default)]
pub(super) struct Macro {
    /// Its parameters, with what they are where nothing is given.
    pub(super) parameters: Vec<(Name, Option<Node>)>,
    pub(super) body: Vec<Step>,
}

/// A statement.
pub(super) enum Step {
    Text(Box<str>),
    Output(Node),
    If(Node, Vec<Step>, Vec<Step>),
    For(Box<For>),
    Set(Name, Node),
    SetAttribute(Name, Name, Node),
    /// What the body writes, as a variable.
    Capture(Name, Vec<Step>),
    /// A scope of its own, with these variables.
    With(Vec<(Name, Node)>, Vec<Step>),
    Macro(Name, usize),
    Break,
    Continue,
    /// Left to the library.
    Beyond,
}

/// A loop.
pub(super) struct For {
    /// One variable for each item, or one for each of the parts of an item.
    pub(super) targets: Vec<Name>,
    pub(super) is_unpacked: bool,
    pub(super) over: Node,
    pub(super) body: Vec<Step>,
    pub(super) otherwise: Vec<Step>,
}

/// An expression.
pub(super) enum Node {
    Text(Box<str>),
    Number(i64),
    Bool(bool),
    Null,
    List(Vec<Node>),
    Variable(Name),
    /// Of the innermost loop.
    Loop(LoopField),
    Attribute(Box<Node>, Name),
    Item(Box<Node>, Box<Node>),
    Slice(Box<[Option<Node>; 3]>, Box<Node>),
    Not(Box<Node>),
    And(Box<Node>, Box<Node>),
    Or(Box<Node>, Box<Node>),
    Binary(Operator, Box<Node>, Box<Node>),
    Choice(Box<[Node; 2]>, Option<Box<Node>>),
    Filter(Filter, Box<Node>, Vec<Node>),
    Test(Test, Box<Node>, Vec<Node>),
    Method(Method, Box<Node>, Vec<Node>),
    Namespace(Vec<(Name, Node)>),
    Call(Name, Vec<(Option<Name>, Node)>),
    Beyond,
}

#[derive(Clone, Copy)]
pub(super) enum LoopField {
    Index,
    Index0,
    First,
    Last,
    Length,
    Previous,
    Next,
}

#[derive(Clone, Copy)]
pub(super) enum Operator {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
    Add,
    Subtract,
    Remainder,
    Join,
}

#[derive(Clone, Copy)]
pub(super) enum Filter {
    Length,
    Trim,
    /// With so many spaces at each level, or on one line.
    ToJson(Option<usize>),
    TextToJoin,
    String,
    Default,
    Items,
}

#[derive(Clone, Copy)]
pub(super) enum Test {
    Defined,
    Undefined,
    Null,
    String,
    Mapping,
    /// `iterable` and `sequence`, which differ in nothing that is done here.
    HasItems,
    Number,
    Bool,
    True,
    False,
    Equal,
    Unequal,
    In,
}

#[derive(Clone, Copy)]
pub(super) enum Method {
    Strip { start: bool, end: bool },
    StartsWith,
    EndsWith,
    Split,
    Get,
    Items,
}
