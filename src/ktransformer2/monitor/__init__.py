"""Eyes on a running cache: metrics over HTTP for whoever has one, and what `ktransformer-monitor` shows of them.

    from ktransformer2.monitor import serve_metrics

    with serve_metrics(llm.cache, port=8765) as server:
        print(server.url)

`server` and `routes` are the side of the cache, `client` and `views` that of the reader; `health` judges for both.
Reads only what the cache has published; no text and no token id is in any figure.
"""

from ktransformer2.monitor.server import MetricsServer, serve_metrics

__all__ = ["MetricsServer", "serve_metrics"]
