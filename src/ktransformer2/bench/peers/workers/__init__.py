"""One file for each peer, run by the peer's own interpreter through `serve.py`. None but `ours` imports what is ours.

A file holds one class `Peer`. Its constructor takes what the contender's options say and loads the model; then

    about()                     what runs: versions, the form of the KV cache
    read(ids, room, reuse)      seconds to the first token behind `ids`, and that token. `room`: how many tokens will be
                                asked for behind it. `reuse`: what is known of the beginning of `ids` may be used again,
                                and `reused` says how many tokens; else everything is computed
    step()                      the next token, or several; `serve` takes its time. Or, where a peer times itself:
    decode(count)               seconds of each of `count` further tokens, and the tokens
    batch(prompts, count)       seconds until every prompt has its `count` tokens, and the tokens; all start at once
    save(path), restore(path)   what was read, to a file and back, where the peer can; then `read(..., reuse=True)`
"""
