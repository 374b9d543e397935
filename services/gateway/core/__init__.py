"""What the gateway decides, without a loop, a clock or a socket.

``machine`` is one request's life, ``streams`` puts its tokens in order, ``detokenize`` and ``stops`` turn them into
text that may be sent, ``openai`` is the vocabulary of the clients and ``problem`` what they hear when it fails.
"""
