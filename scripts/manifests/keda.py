"""KEDA's resources as JSON schemas, read from the one place where a registry has them whole: Python classes made of its CRDs.

The classes are read, not run: that would take the package's newer Python and all that it depends on.
"""

import ast

PLAIN = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
BOUNDS = {"ge": "minimum", "le": "maximum", "min_length": {"string": "minLength", "array": "minItems"}}


def schema(source, kind):
    """The schema of a kind's documents, of which a status is no part."""
    classes = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)}
    return {
        "type": "object", "required": ["apiVersion", "kind", "metadata", "spec"], "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "keda.sh/v1alpha1"}, "kind": {"const": kind}, "metadata": {"type": "object"},
            "spec": of_class(classes, f"{kind}Spec"),
        },
    }


def of_class(classes, name):
    made = classes[name]
    if any(ast.unparse(base).startswith("RootModel") for base in made.bases):
        return {}  # a quantity, which may be a number or a text
    fields = [field for field in made.body if isinstance(field, ast.AnnAssign)]
    properties = dict(of_field(classes, field) for field in fields)
    required = [called for called, field in zip(properties, fields) if field.value is None]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def of_field(classes, field):
    """A field's name in a document, and its schema."""
    kind, called, bounds = field.annotation, field.target.id, {}
    if isinstance(kind, ast.Subscript) and kind.value.id == "Annotated":
        kind, said = kind.slice.elts
        bounds = {word.arg: ast.literal_eval(word.value) for word in said.keywords}
        called = bounds.pop("alias", called)
    made = of_type(classes, kind)
    for word, bound in bounds.items():
        put = BOUNDS[word]
        made[put if isinstance(put, str) else put[made["type"]]] = bound
    return called, made


def of_type(classes, kind):
    match kind:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return of_type(classes, left)  # None is for what is left out: an API server takes no null
        case ast.BinOp(left=left, right=right):
            return {"anyOf": [of_type(classes, left), of_type(classes, right)]}
        case ast.Name(id=name):
            return {"type": PLAIN[name]} if name in PLAIN else of_class(classes, name)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            choices = ast.literal_eval(choices)
            return {"enum": list(choices) if isinstance(choices, tuple) else [choices]}
        case ast.Subscript(value=ast.Name(id="list"), slice=items):
            return {"type": "array", "items": of_type(classes, items)}
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, values])):
            return {"type": "object", "additionalProperties": of_type(classes, values)}
    raise ValueError(f"a type that is not read here: {ast.unparse(kind)}")
