"""The papers' figures and tables: one YAML and one short module each, and the claims they answer.

`gllm-12` is gllm_12.yaml (deployment, systems, sizes) and gllm_12.py (`make`: runs, table, plot).
"""
