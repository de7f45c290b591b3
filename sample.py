"""Text from a checkpoint, streamed as it comes.

    python sample.py out/gf2-smoke --prompt "def main():"
    python sample.py out/gf2-smoke --temperature 0      always the likeliest token

The text ends at the separator, which closes every document in training, or at --max_new_tokens.
An empty prompt starts from the separator, as a document does in training. Where its code is zero,
the first token is then uniform over the vocabulary, and temperature 0 ends the text at once.
"""

import argparse

import torch
from tokenizers.decoders import DecodeStream

from device import pick_device, refusals
from model import find_checkpoint, load_checkpoint
from tokenizer import SEPARATOR, load_tokenizer, tokenizer_path


def stream_text(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed):
    """Yield the prompt and then its continuation, piece by piece, each of whole characters.

    Bytes at the very end that make no whole character are left out. Raises ValueError.
    """
    separator = tokenizer.token_to_id(SEPARATOR)
    prompt.encode()  # a prompt that is no text ends here, with a ValueError
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [separator]
    if max_new_tokens < 1 or len(ids) + max_new_tokens > model.config.max_seq_len:
        raise ValueError(
            f"{len(ids)} tokens of prompt and {max_new_tokens} new ones do not fit in max_seq_len "
            f"{model.config.max_seq_len}; choose --max_new_tokens of at least 1 and at most "
            f"{model.config.max_seq_len - len(ids)}"
        )
    if not (temperature == 0 or 0.01 <= temperature <= 100) or top_k < 1:
        what = f"temperature {temperature} and top_k {top_k}"
        raise ValueError(f"{what}; give 0 or 0.01 to 100, and from 1 up")
    yield prompt
    generator = torch.Generator().manual_seed(seed)
    decoder = DecodeStream(ids=ids)  # holds back the bytes of an unfinished character
    prompt_ids = torch.tensor([ids], device=model.head.weight.device)  # (1, T)
    for next_ids in model.generate(prompt_ids, max_new_tokens, temperature, top_k, generator):
        if next_ids.item() == separator:
            return
        yield decoder.step(tokenizer, next_ids.item()) or ""


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, for its newest step, or a step folder")
    parser.add_argument("--prompt", default="", help="the text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    parser.add_argument("--top_k", type=int, default=200, help="draw from so many (200)")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps, ...")
    args = parser.parse_args(argv)
    with refusals(parser):
        model = load_checkpoint(args.run, pick_device(args.device))
        path = tokenizer_path(find_checkpoint(args.run))
        tokenizer = load_tokenizer(path, model.config.vocab_size)
        choice = args.prompt, args.max_new_tokens, args.temperature, args.top_k, args.seed
        for piece in stream_text(model, tokenizer, *choice):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
