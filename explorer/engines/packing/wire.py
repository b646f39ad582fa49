"""How the explorer asks for packed log-probabilities, and how an engine tells them.

A request with `logprobs` and this header gets `{"packed": base64 of little-endian float32}` as the `logprobs` of a
choice, a number for each of its `token_ids`, from an engine that can; from any other what it always gets. In a stream
they come in the order of the tokens, and not before them: with a later piece, or the last.
"""

HEADER = "X-Tuneloop-Logprobs"
PACKED = "packed"
