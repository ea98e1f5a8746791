"""Small tokenizers of the three common kinds, trained in the test."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from expediter.engine.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße aus München, naïve café, 你好世界, こんにちは, привет 😀👩‍👩‍👧 done.",
    "def f(x):\n    return x ** 2\n",
] * 3


def byte_level() -> Tokenizer:
    """GPT-2's scheme: every token is a run of bytes, which may begin or end inside a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("«added»", normalized=False)])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """Llama 2's scheme: words with a leading mark, single bytes for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,ü",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("o", "x"), ("f", "ox"), ("▁", "fox")):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    """BERT's scheme: spaces come from the decoder."""
    pieces = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "the", "fox"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)
