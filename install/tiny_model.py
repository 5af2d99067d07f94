#!/usr/bin/env python3
"""Writes a tiny language model that vLLM can serve offline: config, tokenizer, chat template, real random weights.

    tiny_model.py OUT [--family llama|llama-wide|lfm2] [--seed 7]

OUT is complete when it exists: it is built beside its place and renamed as a whole. The same arguments give the same
bytes. `llama` has one cache group; `lfm2` is a hybrid, short-convolution state in one group and attention in another;
`llama-wide` computes twenty times as much per KV byte (46 kFLOP in float32), which is nearer to what real models do
(gpt-oss-120b: about 140, Qwen3-Coder-30B: about 60).

Weights are drawn with a large deviation, so that the next token depends strongly on every token before it: a wrong,
stale or shifted KV block changes the greedy text. The usual tiny weights would make all logits nearly equal and leave
such a block unseen.

The tokenizer is trained on text made here from a fixed list of words, so nothing else is needed; it has a few
thousand tokens, so that prompts of several thousand tokens are of the length that people would expect of them.
Run it with the python of the environment that has vLLM: torch, transformers, tokenizers and safetensors come with it.
"""

import argparse
import hashlib
import json
import pathlib
import shutil
import tempfile

VOCABULARY = 4096
CONTEXT = 32768
SPECIAL = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

WORDS = """
the of and to in is that it for was on are as with be by at from this have not or an they which one you had but all
we can her has there been if more when will would who so no said what up its about into than them only other time new
some could these two may then do first any my now such like our over man me even most made after also did many before
must through back years where much your way well down should because each just those people how too little state good
very make world still own see men work long get here between both life being under never day same another know while
last might us great old year off come since against go came right used take three file line code function return value
string number list map key read write open close path name type test error data user system server client request
reply message token model cache block row table index store load drive memory process thread lock queue time clock
node port socket network host build run start stop check change update remove insert find search match parse print
format version config option default result state event handler signal timer buffer stream frame header body length
size count total offset page segment record field entry item object class method module package import export public
private static final const let var mut self super struct enum trait impl use pub crate async await spawn select loop
break continue while match else switch case throw catch finally true false null none some ok err unwrap expect assert
branch commit merge rebase push pull clone fetch patch diff review issue ticket fix feature release deploy service
container image volume cluster replica shard leader follower vote term log snapshot compact recover repair replay
window column cell matrix vector tensor layer head weight bias gradient batch epoch step loss train infer sample
question answer please explain write small program that reads every line and counts words keeps order without using
extra space then shows how long it took on average for large input with many repeated values across several runs
"""
PARTS = ["re", "un", "pre", "sub", "over", "out", "multi", "non"]
ENDS = ["s", "ed", "ing", "er", "ly", "able", "ness", "ment", "less", "ful"]
FORMS = ["{a} {b}", "{a}_{b}", "{a}.{b}", "{a}({b})", "{a}: {b}", "{a}, {b}", '"{a}"', "{a} = {b};", "{a}-{b}", "[{n}]"]

CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is none or content is undefined -%}{%- elif content is string -%}{{ content }}"
    "{%- else -%}{%- for part in content -%}{{ part.text if part.text is defined else '' }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "<|bos|>"
    "{%- if tools %}<|system|>tools: {{ tools | tojson }}<|eos|>{% endif -%}"
    "{%- for m in messages -%}"
    "{%- set role = m['role'] if m['role'] in ['system', 'user', 'assistant', 'tool'] else 'user' -%}"
    "<|{{ role }}|>{{ text(m['content']) }}"
    "{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif -%}"
    "<|eos|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)


class Dice:
    """Numbers that are the same everywhere and in every version of Python."""

    def __init__(self, seed: str):
        self.seed, self.at, self.left = seed, 0, b""

    def below(self, limit: int) -> int:
        if len(self.left) < 4:
            self.left = hashlib.sha256(f"{self.seed}/{self.at}".encode()).digest()
            self.at += 1
        word, self.left = self.left[:4], self.left[4:]
        return int.from_bytes(word, "little") % limit


def corpus(lines: int = 9000) -> list[str]:
    """Text with the mix of plain sentences, names and punctuation that coding sessions have."""
    dice, words = Dice("spark-kv tiny text"), WORDS.split()

    def word() -> str:
        # The smaller of two draws: early words are frequent, as in real text.
        base = words[min(dice.below(len(words)), dice.below(len(words)))]
        kind = dice.below(12)
        if kind == 0:
            base = PARTS[dice.below(len(PARTS))] + base
        if kind in (1, 2, 3):
            base += ENDS[dice.below(len(ENDS))]
        if kind == 4:
            base = base.capitalize()
        return base

    out = []
    for _ in range(lines):
        parts = []
        for _ in range(6 + dice.below(10)):
            form = FORMS[dice.below(len(FORMS))] if dice.below(3) == 0 else "{a}"
            parts.append(form.format(a=word(), b=word(), n=dice.below(1000)))
        out.append(" " * (4 * dice.below(3)) + " ".join(parts) + (".\n" if dice.below(2) else "\n"))
    return out


def write_tokenizer(out: pathlib.Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1],
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer.get_vocab_size()


def make_net(family: str, vocabulary: int):
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "llama-wide":
        common |= {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 1}
    if family.startswith("llama"):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(head_dim=64, rms_norm_eps=1e-5, **common)), {}
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention", "conv", "full_attention"]
    # Names that vLLM reads and transformers no longer writes.
    more = {"conv_dim": 256, "conv_dim_out": 256, "conv_bias": False, "block_dim": 256, "tie_word_embeddings": False}
    return Lfm2ForCausalLM(Lfm2Config(layer_types=kinds, conv_L_cache=3, **common)), more


def write_model(out: pathlib.Path, family: str, seed: int, deviation: float) -> int:
    import torch
    from safetensors.torch import save_file

    vocabulary = write_tokenizer(out)
    net, more = make_net(family, vocabulary)
    net = net.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in sorted(net.state_dict().items()):
        if value.dim() > 1:
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            value = (drawn * (4 * deviation / value.shape[-1] ** 0.5)).to(torch.bfloat16)
        weights[name] = value.contiguous()
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    settings = net.config.to_dict() | more
    settings["architectures"] = [type(net).__name__]
    settings["dtype"] = settings["torch_dtype"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True, default=str))
    # Greedy unless a request says otherwise.
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.0}))
    return sum(w.numel() for w in weights.values())


def main() -> None:
    arguments = argparse.ArgumentParser(description="Writes a tiny model for tests.")
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--family", choices=["llama", "llama-wide", "lfm2"], default="llama")
    arguments.add_argument("--seed", type=int, default=7)
    arguments.add_argument("--std", type=float, default=0.4, help="deviation of the weights")
    a = arguments.parse_args()
    if a.out.exists():
        print(a.out, "is complete")
        return
    a.out.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=a.out.name + ".", dir=a.out.parent))
    try:
        count = write_model(work, a.family, a.seed, a.std)
        work.chmod(0o755)
        try:
            work.rename(a.out)
        except OSError:
            # Another call was faster; the same arguments give the same bytes.
            if not a.out.exists():
                raise
        print(a.out, count, "parameters")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
