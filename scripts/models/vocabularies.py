"""A tokenizer.json from the vocabulary that a model's makers publish in another form.

Nothing here is fetched or written: bytes go in, the text of a tokenizer.json comes out.
"""

import base64
import json

GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}

# Special tokens, in the order of their ids; those that begin with "!" are added tokens without being special.
GLM_TOKENS = """<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>
    <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|>
    <|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|> !<think>
    !</think> !<tool_call> !</tool_call> !<tool_response> !</tool_response> !<arg_key> !</arg_key> !<arg_value>
    !</arg_value> !/nothink <|begin_of_box|> <|end_of_box|> <|image|> <|video|>""".split()
QWEN35_TOKENS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> !<tool_call>
    !</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> !<tool_response>
    !</tool_response> !<think> !</think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod>
    <tts_text_bos_single> <|audio_pad|>""".split()
MISTRAL_TOKENS = {
    index: token
    for index, token in enumerate(
        """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
        [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]
        [TOOL_CONTENT]""".split()
    )
}
PHI4_TOKENS = {
    1: "<|endoftext|>",
    2: "<|fim_prefix|>",
    3: "<|fim_middle|>",
    4: "<|fim_suffix|>",
    8: "<|im_start|>",
    9: "<|im_end|>",
    10: "<|im_sep|>",
    20: "<|endofprompt|>",
}


def letters():
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def model(ranks, first_id, ignore_merges):
    """Byte pair encoding from tokens in the order of their ranks: every way to make a token of two is a merge."""
    table = letters()

    def text(token):
        return "".join(table[byte] for byte in token)

    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in rank_of and pair[1] in rank_of]
        known.sort(key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
        merges.extend([text(left), text(right)] for left, right in known)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {text(token): first_id + rank for rank, token in enumerate(ranks)},
        "merges": merges,
    }


def added(first_id, tokens):
    return [
        {
            "id": first_id + index,
            "content": token.removeprefix("!"),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": not token.startswith("!"),
        }
        for index, token in enumerate(tokens)
    ]


def tokenizer(words, model, added_tokens, normalizer=None, post_processor=None):
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": post_processor or BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": model,
    }
    return dumps(whole)


def dumps(tokenizer):
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))


def ranks(tiktoken):
    """The tokens of a rank file, which has one of them and its rank on each line."""
    lines = [line.split() for line in tiktoken.splitlines() if line]
    if [int(rank) for _, rank in lines] != list(range(len(lines))):
        raise ValueError("a rank file with gaps")
    return [base64.b64decode(token) for token, _ in lines]


def glm(tiktoken):
    tokens = ranks(tiktoken)
    return tokenizer(GPT4_WORDS, model(tokens, 0, True), added(len(tokens), GLM_TOKENS))


def phi4(tiktoken):
    tokens = ranks(tiktoken)
    numbers = iter(range(96))
    names = [PHI4_TOKENS.get(index) or f"<|dummy_{next(numbers)}|>" for index in range(96)]
    return tokenizer(GPT4_WORDS, model(tokens, 0, False), added(len(tokens), names))


def qwen35(tiktoken):
    """Approximate: 232 tokens of the real vocabulary are not what merging by rank arrives at."""
    tokens = ranks(tiktoken)
    added_tokens = added(len(tokens), QWEN35_TOKENS)
    return tokenizer(QWEN35_WORDS, model(tokens, 0, True), added_tokens, {"type": "NFC"})


def mistral(tekken):
    source = json.loads(tekken)
    config = source["config"]
    special = config["default_num_special_tokens"]
    tokens = [base64.b64decode(token["token_bytes"]) for token in source["vocab"]]
    tokens = tokens[: config["default_vocab_size"] - special]
    names = [MISTRAL_TOKENS.get(index, f"<SPECIAL_{index}>") for index in range(special)]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    post_processor = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    merging = model(tokens, special, True)
    return tokenizer(config["pattern"], merging, added(0, names), post_processor=post_processor)


def qwen25(qwen3):
    """Qwen2.5's is Qwen3's less the four tokens that came with thinking and tool results."""
    whole = json.loads(qwen3)
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < 151665]
    return dumps(whole)
