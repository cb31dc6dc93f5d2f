"""The door for programs: an OpenAI-compatible server over one `LLM`. Extra `serve`.

    engine_thread, streams   the one thread that owns engine and cache, and what it sends to whoever waits in the loop
    facts, prompts           what any thread may know of the model; a tokenizer of the loop's own
    gate, keys, limits       who may come in, under which salt, and how much each may take
    schemas, messages        what clients send
    answers, problems, sse   what they get: usage, log probabilities, errors, events
    completions, chat, responses (with conversations)   a route each; cache_routes: what is asked of the cache
    turns, tools, grammar, answer_reader   what chats and responses share: tools, JSON schemas, parts of an answer
    service                  one served model, as every route sees it
    app, serving             all routes behind the gate; a socket, a key where one is needed, uvicorn
    status_line              a line in the log while there is work

`async` lives in this room only. Nothing that is logged, counted or served as a figure holds text or token ids.
"""
