"""Text from a checkpoint, streamed as it comes.

    python sample.py out/gf2-smoke --prompt "def main():"
    python sample.py out/gf2-smoke --temperature 0      always the likeliest token

The text ends at the separator, which closes every document in training, or at --max_new_tokens.
An empty prompt starts from the separator, as a document does in training. Where its code is zero,
the first token is then uniform over the vocabulary, and temperature 0 ends the text at once.
"""

import torch
from tokenizers.decoders import DecodeStream

from model import load_checkpoint
from nanocodes.checkpoint import find_checkpoint
from nanocodes.command import make_parser, refusals
from nanocodes.device import pick_device
from nanocodes.tokenizer import SEPARATOR, load_tokenizer, tokenizer_path


def encode_prompt(tokenizer, prompt):
    """The token ids of a prompt, at least one: an empty prompt becomes the separator.

    Raises ValueError if the prompt holds bytes that are no text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid text ({error}); write it in UTF-8") from None
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids or [tokenizer.token_to_id(SEPARATOR)]


def check_options(prompt_tokens, max_new_tokens, max_seq_len, temperature, top_k):
    """Raise ValueError if the text does not fit in the context or an option is out of range."""
    if max_new_tokens < 1 or prompt_tokens + max_new_tokens > max_seq_len:
        raise ValueError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones do not fit in "
            f"max_seq_len {max_seq_len}; choose --max_new_tokens of at least 1 and at most "
            f"{max_seq_len - prompt_tokens}"
        )
    if temperature != 0 and not 0.01 <= temperature <= 100:
        raise ValueError(f"temperature {temperature} is out of range; give 0, or from 0.01 to 100")
    if top_k < 1:
        raise ValueError(f"top_k {top_k} is out of range; give at least 1")


def stream_text(model, tokenizer, prompt, *, max_new_tokens, temperature, top_k, seed):
    """Yield the prompt and then its continuation, piece by piece, each of whole characters.

    Bytes at the very end that make no whole character are left out. Raises ValueError, before
    the first piece, if the prompt or an option cannot be used.
    """
    ids = encode_prompt(tokenizer, prompt)
    check_options(len(ids), max_new_tokens, model.config.max_seq_len, temperature, top_k)
    yield prompt
    separator = tokenizer.token_to_id(SEPARATOR)
    generator = torch.Generator().manual_seed(seed)
    decoder = DecodeStream(ids=ids)  # holds back the bytes of an unfinished character
    prompt_ids = torch.tensor([ids], device=model.head.weight.device)  # (1, T)
    for next_ids in model.generate(prompt_ids, max_new_tokens, temperature, top_k, generator):
        next_id = next_ids.item()
        if next_id == separator:
            return
        yield decoder.step(tokenizer, next_id) or ""


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("run", help="a run folder, for its newest step, or a step folder")
    parser.add_argument("--prompt", default="", help="the text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    parser.add_argument(
        "--top_k", type=int, default=200, help="draw from so many likeliest tokens; default 200"
    )
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps, ...")
    args = parser.parse_args(argv)

    with refusals(parser):
        model = load_checkpoint(args.run, pick_device(args.device))
        path = tokenizer_path(find_checkpoint(args.run))
        tokenizer = load_tokenizer(path, model.config.vocab_size)
        pieces = stream_text(
            model,
            tokenizer,
            args.prompt,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
