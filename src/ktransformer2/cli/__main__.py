"""`python -m ktransformer2.cli`: the same as `ktransformer`."""

from ktransformer2.cli import main

main()
