use super::compile::Compiler;
use super::*;

/// The parts of a text that matches make, and, in parentheses, those between.
fn parts(pattern: &str, text: &str) -> Result<String, Spent> {
    let mut compiler = Compiler::default();
    let program = compiler.pattern(pattern).unwrap();
    let classes = Classes::read(&compiler.table().write()).unwrap();
    let mut matcher = Matcher::default();
    let (mut parts, mut at, mut done) = (String::new(), 0, 0);
    while at < text.len() {
        match matcher.end(&program, &classes, text, &(0..text.len()), at)? {
            Some(end) => {
                if at > done {
                    parts += &format!("({})", &text[done..at]);
                }
                parts += &format!("[{}]", &text[at..end]);
                (at, done) = (end, end);
            }
            None => at += text[at..].chars().next().unwrap().len_utf8(),
        }
    }
    if text.len() > done {
        parts += &format!("({})", &text[done..]);
    }
    Ok(parts)
}

#[track_caller]
fn check(pattern: &str, text: &str, expected: &str) {
    assert_eq!(parts(pattern, text).as_deref(), Ok(expected), "{pattern:?} in {text:?}");
}

#[track_caller]
fn check_refused(pattern: &str, expected: &str) {
    assert_eq!(Compiler::default().pattern(pattern).err().as_deref(), Some(expected));
}

#[test]
fn alternatives_are_tried_in_their_order() {
    check("a|ab", "abab", "[a](b)[a](b)");
    check("ab|a", "aba", "[ab][a]");
    check("(?:ab|a)b", "ab", "[ab]");
}

#[test]
fn repetitions_take_much_and_give_back() {
    check("a*b", "aaabaa", "[aaab](aa)");
    check("a+ab", "aaab", "[aaab]");
    check("a++ab", "aaab", "(aaab)");
    check("a{2,3}", "aaaaaaa", "[aaa][aaa](a)");
    check("(?:ab){2}", "ababab", "[abab](ab)");
    check("(?:ab)+", "ababa", "[abab](a)");
    check("a.*?e", "axeye", "[axe](ye)");
    check(r"\p{Lu}*\p{Ll}+|\p{Lu}+", "HTTPServer", "[HTTPServer]");
}

#[test]
fn look_arounds_look_and_take_nothing() {
    check(r"\s+(?!\S)|\s+", "a   b  ", "(a)[  ][ ](b)[  ]");
    check("a+(?=b)", "aab aa", "[aa](b aa)");
    check("(?<=x)a|(?<!x)b", "xa a xb b", "(x)[a]( a xb )[b]");
}

#[test]
fn cases_and_classes_are_onigurumas() {
    check("(?i:'s)|x", "'S'ſX'sx", "['S]['ſ](X)['s][x]");
    check("a(?i)b|c", "aBaC", "[aB][aC]");
    check(r"\w+", "a\u{200d}b²_", "[a](\u{200d})[b²_]");
    check(r"\W+", "a\u{200d} b", "(a)[\u{200d} ](b)");
    check(r"[^\w]", "a-²", "(a)[-](²)");
    check(r"[\p{L}&&[^\p{Han}]]+", "ab漢c", "[ab](漢)[c]");
    check(".", "a\n", "[a](\n)");
    check(r"\.|]|\x41|\u0042", "a.]AB", "(a)[.][]][A][B]");
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    check_refused("a|", "matches the empty text");
    check_refused(r"\s*", "matches the empty text");
    check_refused("^a", "the anchor '^'");
    check_refused(r"a\b", r"the escape \b");
    check_refused(r"(a)\1", r"the escape \1");
    check_refused("(?>a)", r#"the group "(?>""#);
    check_refused("(?<=ab)c", "a look-behind of more than one character");
    check_refused("a{2}{3}", "a repeated repetition");
    check_refused("[[:alpha:]]", r#"class "[[:alpha:]]""#);
    check_refused("(?:a*)*b", "a repeated group that may be empty");
    check_refused("(a", "a group without its end");
    check_refused("a)", "')' without its opening");
    check_refused("[a", "a class without its end");
    check_refused(&"(?:ab){900}".repeat(9), "too long a pattern");
}

#[test]
fn a_match_takes_bounded_work() {
    let text = "a".repeat(40);
    assert_eq!(parts("(?:a|aa)+b", &text), Err(Spent));
    assert_eq!(parts("a+b|c", &"a".repeat(4_000_000)), Err(Spent));
    let long = "a".repeat(500_000);
    check("a+", &long, &format!("[{long}]"));
}

#[test]
fn damaged_classes_are_no_classes() {
    let good = Compiler::default().table().write();
    assert!(Classes::read(&good).is_some());
    for length in [0, 1, 100, good.len() - 4, good.len() - 1] {
        assert!(Classes::read(&good[..length]).is_none(), "{length}");
    }
    let mut astray = good;
    astray[1] = 0xFF;
    assert_eq!(Classes::read(&astray), None);
}
