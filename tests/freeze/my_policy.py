from evenflow.types import Plan, Prefill


class ShortestFirst:
    """All ready decodes; and of the waiting prompts, the shortest one that fits."""

    def schedule(self, view):
        fitting = [
            p for p in view.waiting if -(-p.tokens // view.page_tokens) <= view.free_pages // 2
        ]
        shortest = min(fitting, key=lambda p: p.tokens, default=None)
        prefills = [Prefill(shortest.request_id, shortest.tokens)] if shortest else []
        return Plan(prefills, decodes=view.ready_decodes)
