"""The papers' figures and tables: one YAML each, and the claims they answer.

`gllm-12` is gllm_12.yaml: deployment, systems, sizes, what varies, what is drawn and claimed.
"""
