"""The experiments of four papers as tables of specs: run, compared with what was published, and judged."""
