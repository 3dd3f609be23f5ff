#!/usr/bin/env python3
"""Makes tests/data/tokens/kinds.json: small tokenizers of every kind, and what Python's `tokenizers` makes of texts.

    python3 scripts/models/token_vectors.py        (needs the package `tokenizers`)

Vocabularies are trained here, on the sentences below. The texts are generated from a seed, by the same few lines in
src/tokens/kinds.rs; of each tokenizer's ids the digest is kept.
"""

import copy
import gzip
import json
import pathlib

import tokenizers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and the other dogs that were there when they jumped over it again",
    "def function(argument): return argument + 1 # and then the next one, with 12 and 345 in it; it's what we'll do",
    "Быстрая лиса прыгает через собаку и кошку",
    "敏捷的狐狸跳过了懒狗 你好世界",
    "El niño comió café y después volvió a la montaña",
    "素早い茶色の狐 カタカナ",
    "where there is another there is the thing that is not there either, said the author to the other authors",
] * 3
WORDS = (
    "the quick fox jumps there's WE'LL don't HTTPServer camelCase snake_case naïve Ünïcödé straße ﬁ ǅ İstanbul ſ authors "
    "Быстрая лиса Ёлка Η γρήγορη ΣΊΣΥΦΟΣ ς الثعلب السريع ١٢٣٤ השועל שָׁלוֹם तेज़ लोमड़ी हिन्दी দ্রুত বাদামী விரைவான "
    "สุนัขจิ้งจอก ๑๒๓ 敏捷的棕色狐狸。 你好，世界！ 素早い茶色の狐 カタカナ ｶﾞ 빠른 갈색 여우 가각힣 ქართული Արագ ፈጣን កញ្ជ្រោង café the there"
).split(" ")
ODD = [
    "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "❤️‍🔥", "\u200b", "\ufeff", "\u00a0", "\u3000", "\0", "\x7f", "\x85", "\u2028", "\r\n", "\n\n",
    "\t", "  ", "    ", "e\u0301", "a\u0323\u0307", "\u0301", "½", "№", "Ⅷ", "3.14159", "12345678901234567890", "0xFF", "$12",
    "->", "==", "//", "{}[]()", "<s>", "</s>", "<unk>", "[MASK]", "[UNK]", "<0x0A>", "▁", "▁▁", "Ġ", "''", "``", "'s", "'S",
    '"', "\\n", "http://a.b/c?d=e&f", "fn main() {\n    x;\n}", "\treturn x**2  # ok\n", "\u202e", "\u200d", "\u200c", "𝔘𝔫𝔦",
    "\u1100\u1161\u11a8", "か\u3099", "﷽", "Å", "\u0345", ".", ",", "!?", "-", "_", "1", "22", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " some other ", "…",
]  # fmt: skip
SEED = 0x5EED
MASK = (1 << 64) - 1


class Random:
    def __init__(self, seed):
        self.state = seed

    def below(self, bound):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & MASK
        return (self.state >> 33) % bound


def texts(count):
    random = Random(SEED)
    for _ in range(count):
        text = ""
        for _ in range(1 + random.below(12)):
            kind = random.below(9)
            if kind < 4:
                text += WORDS[random.below(len(WORDS))]
            elif kind == 4:
                text += ODD[random.below(len(ODD))]
            elif kind == 5:
                text += " "
            elif kind == 6:
                text += ODD[random.below(len(ODD))] * (1 + random.below(4))
            elif kind == 7:
                text += chr(random.below(0x530))
            else:
                text += chr(0x4E00 + random.below(0x5000))
        yield text


def digest(tokenizer, count):
    value = 0xCBF29CE484222325
    for text in texts(count):
        for id in [*tokenizer.encode(text).ids, 0xFFFFFFFF]:
            for byte in id.to_bytes(4, "little"):
                value = ((value ^ byte) * 0x100000001B3) & MASK
    return f"{value:016x}"


def trained(model, trainer, normalizer=None, pre_tokenizer=None):
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return json.loads(tokenizer.to_str())


def template(before, after):
    """A post-processor that writes tokens, given with their ids, before and behind."""
    special = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}
    single = [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)]
    tokens = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in {**before, **after}.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def bases():
    N, P = normalizers, pre_tokenizers
    unigram = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    t5 = trained(
        models.Unigram(),
        unigram,
        N.Sequence([N.Nmt(), N.NFKC(), N.Strip(False, True), N.Replace(Regex(" {2,}"), "▁")]),
        P.Metaspace(),
    )
    t5["post_processor"] = template({}, {"</s>": 1})
    spaces = trained(
        models.Unigram(),
        unigram,
        N.Sequence([N.Replace("``", '"'), N.NFKD(), N.StripAccents(), N.Lowercase(), N.Replace(Regex(" {2,}"), " ")]),
        P.Sequence([P.WhitespaceSplit(), P.Metaspace()]),
    )
    whole = trained(models.Unigram(), unigram, None, P.Metaspace(prepend_scheme="first", split=False))
    whole["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    whole["model"]["byte_fallback"] = True
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = trained(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer(
            vocab_size=620, special_tokens=["<unk>", "<s>", "</s>", *fallback], limit_alphabet=200, show_progress=False
        ),
        None,
        P.Metaspace(),
    )
    characters["added_tokens"] = characters["added_tokens"][:3]
    bert = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(
            vocab_size=240, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
        ),
        N.BertNormalizer(),
        P.BertPreTokenizer(),
    )
    bert["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    words = trained(
        models.WordLevel(unk_token="[UNK]"),
        trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False),
        None,
        P.Whitespace(),
    )
    plain = trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=360, initial_alphabet=P.ByteLevel.alphabet(), show_progress=False),
        None,
        P.ByteLevel(add_prefix_space=False),
    )
    return {
        "unigram": t5,
        "unigram of words": spaces,
        "unigram with bytes": whole,
        "characters": characters,
        "wordpiece": bert,
        "wordlevel": words,
        "bytes": plain,
    }


def variants(base):
    """Name, base, what is put in place of its fields, and how many texts."""
    for name in base:
        yield name, name, {}, 10_000
    normal = lambda *members: {"/normalizer": {"type": "Sequence", "normalizers": members}}
    mark = lambda **options: {"/pre_tokenizer": {"type": "Metaspace", "replacement": "▁", **options}}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    llama = {**normal({"type": "Prepend", "prepend": "▁"}, space), "/pre_tokenizer": None}
    yield "Llama 2", "characters", {**llama, "/post_processor": template({"<s>": 1}, {})}, 10_000
    yield "first", "characters", mark(prepend_scheme="first", split=True), 1_000
    added = {"id": 620, "content": "some other", "single_word": True, "lstrip": True, "rstrip": True}
    added = [*base["characters"]["added_tokens"], {**added, "normalized": True, "special": False}]
    added[-1]["id"] = len(base["characters"]["model"]["vocab"])
    yield "whole", "characters", {**mark(prepend_scheme="always", split=False), "/added_tokens": added}, 1_000
    never = mark(prepend_scheme="never", split=True)
    yield "unknown", "characters", {**never, "/model/byte_fallback": False}, 1_000
    alone = {"/model/byte_fallback": False, "/model/fuse_unk": False, "/model/ignore_merges": True}
    yield "unknown, each", "characters", {**never, **alone}, 1_000
    cased = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": False}
    cased = {"/normalizer": {**cased, "lowercase": False}, "/model/max_input_chars_per_word": 8}
    yield "cased", "wordpiece", cased, 1_000
    yield from byte_variants(normal)


def byte_variants(normal):
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = lambda *members: {"/pre_tokenizer": {"type": "Sequence", "pretokenizers": [*members, last]}}
    regex = lambda pattern, behavior="Isolated", invert=False: {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert
    }  # fmt: skip
    text = lambda text, *rest: {**regex("", *rest), "pattern": {"String": text}}
    whole = {**last, "add_prefix_space": True, "use_regex": True}
    roberta = {"type": "RobertaProcessing", "sep": ["e", 5], "cls": ["t", 6], "trim_offsets": True, "add_prefix_space": True}
    yield "prefix", "bytes", {"/pre_tokenizer": whole, "/post_processor": roberta}, 1_000
    for behavior in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        yield f"punctuation {behavior}", "bytes", cut({"type": "Punctuation", "behavior": behavior}), 300
        for invert in [False, True]:
            pattern = r"\s|[aeiou]+|\p{Han}"
            yield f"regex {behavior} {invert}", "bytes", cut(regex(pattern, behavior, invert)), 300
            yield f"text {behavior} {invert}", "bytes", cut(text("th", behavior, invert)), 300
    kinds = {
        "digits": {"type": "Digits", "individual_digits": True},
        "digit runs": {"type": "Digits", "individual_digits": False},
        "fixed length": {"type": "FixedLength", "length": 3},
        "delimiter": {"type": "CharDelimiterSplit", "delimiter": "e"},
        "whitespace": {"type": "Whitespace"},
        "whitespace split": {"type": "WhitespaceSplit"},
        "bert": {"type": "BertPreTokenizer"},
        "lazy": regex(r"a.*?e|\w+?(?=\s)"),
        "look-around": regex(r"(?<=\s)\w+|(?<!\w)\d+|(?i:THE)(?!re)"),
        "possessive": regex(r"\p{L}++|\s*+\n|\p{N}{2}"),
        "groups": regex(r"(?:ab|a(?:bc|d)){1,3}|(\d+\.)?\d+(?:e[+-]?\d+)?|(?i)quick"),
        "classes": regex(r"\w+|\d|[\W&&[^\s]]"),
    }
    for name, kind in kinds.items():
        yield name, "bytes", cut(kind), 1_000
    tail = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
    models_of = {
        "Qwen": contractions + r"\p{L}+|\p{N}|" + tail,
        "Qwen3.5": contractions + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + tail[tail.index("[\\r") :],
        "four digits": contractions + r"\p{L}+|\p{N}{1,4}|" + tail,
    }
    for name, pattern in models_of.items():
        yield name, "bytes", cut(regex(pattern)), 10_000 if name == "Qwen3.5" else 2_000
    byte_level = {**last, "use_regex": True}
    chain = [regex(r"\p{N}{1,3}"), regex("[一-龥]+"), {"type": "Punctuation", "behavior": "MergedWithPrevious"}]
    yield "chain", "bytes", {"/pre_tokenizer": {"type": "Sequence", "pretokenizers": [*chain, byte_level]}}, 1_000
    replace = lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content}
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    yield "compatible", "bytes", normal({"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}), 1_000
    yield "stripped", "bytes", normal(strip, {"type": "Prepend", "prepend": "_"}), 1_000
    yield "replaced", "bytes", normal(replace({"Regex": r"\s+"}, " "), replace({"Regex": r"\d(?=\d)"}, "#")), 1_000
    yield "composed", "bytes", normal({"type": "NFC"}, replace({"String": "the"}, "THE")), 1_000
    yield "nmt", "bytes", normal({"type": "Nmt"}, {"type": "NFD"}), 1_000


def changed(base, changes):
    tokenizer = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.strip("/").split("/")
        place = tokenizer
        for parent in parents:
            place = place[parent]
        place[last] = value
    return tokenizer


def main():
    base = bases()
    for tokenizer in base.values():
        tokenizer.update(truncation=None, padding=None, decoder=None)
    cases = []
    for name, of, changes, count in variants(base):
        tokenizer = Tokenizer.from_str(json.dumps(changed(base[of], changes)))
        cases.append({"name": name, "base": of, "changes": changes, "texts": count, "digest": digest(tokenizer, count)})
        print(name, cases[-1]["digest"])
    qwen3 = ROOT / "tests/data/models/qwen3/tokenizer.json.gz"
    qwen3 = Tokenizer.from_str(gzip.decompress(qwen3.read_bytes()).decode())
    out = {
        "made_by": f"tokenizers {tokenizers.__version__} (Python)",
        "seed": SEED,
        "words": WORDS,
        "odd": ODD,
        "bases": base,
        "cases": cases,
        "qwen3": {"texts": 10_000, "digest": digest(qwen3, 10_000)},
    }
    folder = ROOT / "tests/data/tokens"
    folder.mkdir(exist_ok=True)
    (folder / "kinds.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
