"""Random tokenizers, trained by Hugging Face's tokenizers and by sentencepiece on given texts."""
import json
import pathlib
import tempfile

import sentencepiece
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = (LLAMA3, LLAMA3.replace("{1,3}", ""), O200K, DEEPSEEK, r"\p{N}{1,3}|[^\s]+|\s+")
SPACE = "\u2581"
ADDED = ("<|endoftext|>", "<tool>", "[X]", "é", SPACE, "e\u0301", "the", "<a b>", "ab c", "<s>", "<|im_start|>")


def changes(random):
    """A normalizer of one to three steps, or None."""
    kinds = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD, normalizers.Lowercase,
             normalizers.StripAccents, normalizers.Nmt, lambda: normalizers.Strip(left=random.random() < .5, right=True))
    if random.random() < .3:
        return None
    steps = [random.choice(kinds)() for _ in range(random.randrange(1, 4))]
    return normalizers.Sequence(steps) if len(steps) > 1 or random.random() < .3 else steps[0]


def words(random):
    """A pre-tokenizer that has a name rather than a pattern."""
    behavior = random.choice(("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"))
    return random.choice((pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit(),
                          pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Punctuation(behavior),
                          pre_tokenizers.CharDelimiterSplit(random.choice("a \u2581é")),
                          pre_tokenizers.FixedLength(random.randrange(1, 9)),
                          pre_tokenizers.Split(Regex(random.choice(PATTERNS)), behavior, random.random() < .5),
                          pre_tokenizers.Split(random.choice((" ", "a", "--", "0")), behavior, random.random() < .5)))


def of_bytes(random):
    """(tokenizer, options of the trainer) with byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    kind = random.randrange(len(PATTERNS) + 1)
    if kind == len(PATTERNS):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=random.random() < .5)
    else:
        steps = [pre_tokenizers.Digits(random.random() < .5)] if random.random() < .3 else []
        how = random.choice((("isolated", False), ("isolated", True), ("removed", True)))
        steps.append(pre_tokenizers.Split(Regex(PATTERNS[kind]), *how))
        if random.random() < .4:
            steps.insert(random.randrange(len(steps) + 1), words(random))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=random.random() < .3, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = changes(random)
    return tokenizer, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}


def of_characters(random):
    """(tokenizer, options of the trainer) with BPE of characters, most with byte fallback."""
    fallback = random.random() < .7
    tokenizer = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=random.random() < .5))
    if random.random() < .5:
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        tokenizer.normalizer = normalizers.Sequence(steps + [normalizers.NFC()] * (random.random() < .3))
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        scheme = random.choice(("always", "first", "never"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=random.random() < .5)
        metaspace = decoders.Metaspace(prepend_scheme=scheme)
        both = decoders.Sequence([decoders.ByteFallback(), metaspace])
        tokenizer.decoder = both if random.random() < .5 else metaspace
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] * fallback
    return tokenizer, {"special_tokens": special}


def character_map(random):
    """Normalizers with a map of sentencepiece's, as those of models that were converted."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text"
        path.write_text("a b c d e f g h\n" * 20)
        sentencepiece.SentencePieceTrainer.train(
            input=str(path), model_prefix=f"{folder}/map", vocab_size=12, hard_vocab_limit=False, minloglevel=2,
            normalization_rule_name=random.choice(("nmt_nfkc", "nmt_nfkc_cf", "nfkc")))
        model = (pathlib.Path(folder) / "map.model").read_bytes()
    steps = [normalizers.Precompiled(map_of_model(model))]
    if random.random() < .5:
        steps.append(normalizers.Strip(left=random.random() < .5, right=True))
    if random.random() < .7:
        steps.append(normalizers.Replace(Regex(" {2,}"), random.choice((" ", SPACE))))
    return normalizers.Sequence(steps) if len(steps) > 1 else steps[0]


def fields(message):
    """(number, value) of each field of a protocol buffer's message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        yield key >> 3, message[at:at + size]
        at += size


def map_of_model(model):
    normalizer = next(value for number, value in fields(model) if number == 3)
    return next(value for number, value in fields(normalizer) if number == 2)


def of_pieces(random, texts):
    """Unigram tokenizer, as those of models that were converted from sentencepiece."""
    tokenizer = Tokenizer(models.Unigram())
    steps = [words(random)] if random.random() < .4 else []
    scheme = random.choice(("always", "first", "never"))
    steps.append(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=random.random() < .7))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.normalizer = random.choice((changes(random), character_map(random), character_map(random)))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    fallback = random.random() < .5
    special = ["<s>", "<pad>", "</s>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] * fallback
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(
        vocab_size=random.choice((500, 900)) + 256 * fallback, show_progress=False, unk_token="<unk>",
        special_tokens=special))
    root = json.loads(tokenizer.to_str())
    root["model"]["byte_fallback"] = fallback
    root["added_tokens"] = [token for token in root["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(root))


def add_tokens(random, tokenizer):
    """Adds some tokens and a template to a tokenizer; returns those."""
    added = []
    for content in ADDED:
        if random.random() < .4:
            special = random.random() < .5
            # tokenizers does not skip a special token that normalization changes.
            added.append(AddedToken(content, lstrip=random.random() < .4, rstrip=random.random() < .4,
                                    normalized=not special and random.random() < .5, special=special))
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if tokenizer.token_to_id("<s>") is not None and random.random() < .7:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A" + " <s>" * (random.random() < .3),
            special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return added


def make_json(random, texts):
    """(tokenizer.json, contents of its added tokens)"""
    if random.random() < .35:
        tokenizer = of_pieces(random, texts)
        added = add_tokens(random, tokenizer)
        return tokenizer.to_str(), [token.content for token in added]
    is_bytes = random.random() < .6
    tokenizer, options = (of_bytes if is_bytes else of_characters)(random)
    has_words = tokenizer.pre_tokenizer is not None
    if not has_words:  # only while it is trained
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=random.choice((400, 700, 1500)), show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    added = add_tokens(random, tokenizer)
    root = json.loads(tokenizer.to_str())
    if not has_words:
        root["pre_tokenizer"] = None
    if is_bytes and random.random() < .5:
        root["model"]["ignore_merges"] = True
    merges = root["model"]["merges"]
    if random.random() < .5 and not any(" " in token for merge in merges for token in merge):
        root["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(root), [token.content for token in added]
