"""Ours against its peers, in turn in one run: vLLM's scheduler and SGLang's prefix caches.

Each participant is a process of its own, the peers in virtual environments of theirs (`environments`), and answers the
same cases over its standard streams (`protocol`). What a case must do is written once for each (`ours`, `vllm_driver`,
`sglang_driver`); `__main__` asks them in turn, round by round, and prints the comparison. Nothing here runs a model.
"""
