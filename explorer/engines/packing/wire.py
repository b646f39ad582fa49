"""How the explorer asks for packed log-probabilities, and how an engine returns them.

A request with `logprobs` and this header gets `{"packed": base64 of little-endian float32}` as the `logprobs` of a
choice, a number for each of its `token_ids`, from an engine that can; from any other what it always gets. In a stream
they come in the order of the tokens, and not before them: with a later piece, or the last.

With `MASK_HEADER` beside it, what `top_p`, `top_k` and `min_p` left of the vocabulary comes with them: `kept`, for each
token how many ids were left, and `kept_ids`, all of these; both base64 of little-endian int32. 0 says that it is not
known: at least `MOST_KEPT` were left, or as many as four times the request's `top_k`.
"""

HEADER = "X-Tuneloop-Logprobs"
PACKED = "packed"
MASK_HEADER = "X-Tuneloop-Sampling-Mask"
MOST_KEPT = 512
